"""Settings of the data that cannot work: documents that do not fit, and what a source passes over."""

from __future__ import annotations

from pathlib import Path

from distca.data.mixes import MIX_NAMES
from distca.data.sources import passed_over
from distca.train.config.names import with_settings
from distca.train.config.schema import DataConfig, RunConfig
from distca.words import count


def data_problems(config: RunConfig, world_size: int) -> list[str]:
    """Returns a sentence for each problem of the settings below data, together or on so many ranks."""
    data, problems = config.data, []
    ranks = max(config.parallel.data_parallel(world_size), 1)
    longest = longest_document(config, world_size)
    if data.context_length > longest and _stay_whole(config, ranks):
        reason = "data.whole_documents keeps a document on one rank"
        if not data.whole_documents:
            reason = "without cad.enabled a document stays on one rank"
        problems.append(
            f"data.context_length is {data.context_length}, but {reason}, which has data.tokens_per_rank "
            f"{data.tokens_per_rank} tokens; lower the first or raise the second."
        )
    elif data.context_length > longest:
        problems.append(
            f"data.context_length is {data.context_length}, but a micro-batch holds {longest} "
            f"tokens ({count(ranks, 'data-parallel rank')} × data.tokens_per_rank {data.tokens_per_rank}); "
            "lower the first or raise the second."
        )
    if data.context_length < 2:
        problems.append("data.context_length is 1, and a document of one token has no next token to learn; raise it.")
    if data.source != "stdlib" and not data.path:
        mixes = f": one of {', '.join(MIX_NAMES)}" if data.source == "mix" else ""
        problems.append(f"data.source {data.source} needs data.path{mixes}.")
    return problems + _path_of_another_source(data) + _unused(data)


def _path_of_another_source(data: DataConfig) -> list[str]:
    """Returns a sentence where only one of data.source and data.path was changed from a mix to files."""
    if data.source == "mix" and data.path and data.path not in MIX_NAMES:
        return [
            f"data.source is mix, but data.path is {data.path}, which is no mix ({', '.join(MIX_NAMES)}); set "
            "DATA_SOURCE (data.source) to what lies there, or data.path to a mix."
        ]
    if data.source not in ("mix", "stdlib") and data.path in MIX_NAMES and not Path(data.path).exists():
        return [
            f"data.source is {data.source}, but data.path is {data.path}, which is a mix; set DATA_PATH (data.path) to "
            "a file or folder, or data.source to mix."
        ]
    return []


def longest_document(config: RunConfig, world_size: int) -> int:
    """Tokens of the longest document that a micro-batch of the run can hold."""
    ranks = max(config.parallel.data_parallel(world_size), 1)
    return config.data.tokens_per_rank * (1 if _stay_whole(config, ranks) else ranks)


def _stay_whole(config: RunConfig, ranks: int) -> bool:
    """Whether every document stays on one of the data-parallel ranks."""
    return config.data.whole_documents or (not config.cad.enabled and ranks > 1)


def _unused(data: DataConfig) -> list[str]:
    names = ("field", "conversations", "begin_token", "end_token")
    given = {name: getattr(data, name) for name in names} | {"bad": data.bad if data.bad == "skip" else None}
    return list(map(with_settings, passed_over(data.source, **given)))
