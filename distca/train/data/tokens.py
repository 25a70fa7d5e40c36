"""A run's texts as tokens: found in the cache, or made by rank 0 while the other ranks wait."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from distca.data.blend import Blend, Ingredient, read_blend
from distca.data.cache import CachedTokens
from distca.data.encoding import processes_for
from distca.data.find_recipe import find_recipe
from distca.data.progress import tokenizing_progress
from distca.data.sources import DocumentSource, open_source
from distca.data.sources.indexed import Indexed
from distca.data.texts import TEXT_KINDS, open_texts
from distca.data.tokenizer import find_tokenizer
from distca.errors import DataError, DistcaError
from distca.train.config.schema import RunConfig
from distca.words import count

if TYPE_CHECKING:
    from megatron_patches.ranks.world import World

logger = logging.getLogger(__name__)

_BEAT_S = 2.0
"""Between two words of rank 0 to those that wait, so that no collective lasts long."""
_SEEN_S = 90.0
"""In which a node must see what another one wrote: by default NFS remembers a folder for up to 60 s (acdirmax)."""
_LOOK_AGAIN_S = 0.5


def is_read_directly(config: RunConfig) -> bool:
    """Whether the run's documents are there without tokenizing: ids, or bytes of files that are no tables."""
    data = config.data
    if data.source in ("mix", "indexed"):
        return True
    packed = data.source == "jsonl" and open_texts("jsonl", data.path).packed
    as_bytes = data.source in ("stdlib", "text", "jsonl") and data.tokenizer == "bytes"
    tried = data.source == "jsonl" and data.bad == "skip"  # each line before any is used
    return as_bytes and not (data.conversations or packed or tried or data.begin_token or data.end_token)


def ingredients(config: RunConfig) -> list[Ingredient]:
    """The sources of the run's documents: those of its blend, or the one that its settings name."""
    data = config.data
    if data.source == "blend":
        parts = read_blend(data.path or "")
        if not any(each.source in TEXT_KINDS for each in parts):
            _refuse_passed_over(config)
        return parts
    return [Ingredient(data.source, data.path, data.field, "epochs", 1.0)]


def _refuse_passed_over(config: RunConfig) -> None:
    """Refuse what would be passed over in a blend without texts, as it is where such a source stands alone."""
    data = config.data
    given = {name: getattr(data, name) for name in ("field", "conversations", "begin_token", "end_token")}
    for name, value in (given | {"bad": data.bad if data.bad == "skip" else None}).items():
        if value:
            shown = "true" if value is True else value
            raise DataError(
                f"`{name}` is {shown}, but all sources of {data.path} are indexed, whose documents are token ids "
                "already; leave it out."
            )


def caches(config: RunConfig) -> list[CachedTokens | None]:
    """Returns the cached tokens of each source; None where ids are read as they are.

    Raises:
        DataError: there is no such tokenizer or text.
    """
    return [_cached(config, each) if each.source in TEXT_KINDS else None for each in ingredients(config)]


def _cached(config: RunConfig, ingredient: Ingredient) -> CachedTokens:
    data = config.data
    recipe = find_recipe(
        data.tokenizer,
        ingredient.field or data.field,
        conversations=data.conversations,
        begin_token=data.begin_token,
        end_token=data.end_token,
    )
    return CachedTokens(Path(config.resolved_cache), open_texts(ingredient.source, ingredient.path), recipe, data.bad)


def find_tokens(config: RunConfig) -> list[str | None] | None:
    """Returns the prefix of the tokens of each source; None where some have to be made first.

    Raises:
        DataError, VersionError: what would make that fail at once, of any source.
    """
    cached = caches(config)
    found = [None if each is None else each.find() for each in cached]
    missing = [each for each, prefix in zip(cached, found, strict=True) if each is not None and prefix is None]
    for each in missing:
        each.look()
    return None if missing else found


def vocabulary_of(config: RunConfig) -> int:
    """The vocabulary of the tokenizer of texts that are still to be tokenized; errors of ``Recipe.open``."""
    return max(each.recipe.open().vocabulary for each in caches(config) if each is not None)


def make_tokens(config: RunConfig) -> list[str | None]:
    """Makes the tokens that are missing, in this process and its children, and returns the prefix of the tokens of each
    source."""
    made: list[str | None] = []
    found = caches(config)
    if (texts := next(filter(None, found), None)) and not config.data.conversations:
        logger.info(texts.recipe.tokenizer.closing())
    for each in found:
        if each is None or (prefix := each.find()) is not None:
            made.append(None if each is None else prefix)
            continue
        processes = processes_for(each.texts.bytes)
        logger.info(
            "Tokenizing %s on %s into %s",
            *(count(len(each.texts.files), "file"), count(processes, "CPU"), config.resolved_cache),
        )
        with tokenizing_progress(each.texts.bytes) as advanced:
            made.append(each.make(processes, advanced))
    return made


def make_tokens_together(config: RunConfig, world: World) -> list[str | None]:
    """The same on all ranks, by rank 0; every rank calls it.

    Raises:
        DataError, VersionError: alike on all ranks.
    """
    import torch.distributed as dist

    work = _started(config) if world.rank == 0 else None
    said: list[list[str | None] | Exception | None] = [None]
    while said[0] is None:
        if work is not None:
            said = [_result_of(work)]
        dist.broadcast_object_list(said)
    if isinstance(said[0], Exception):
        raise said[0]
    return said[0]


def _started(config: RunConfig) -> Future[list[str | None]]:
    """The work in a thread that ends with the process: what interrupts the run must not wait for it."""
    work: Future[list[str | None]] = Future()

    def run() -> None:
        try:
            work.set_result(make_tokens(config))
        except BaseException as error:
            work.set_exception(error)

    threading.Thread(target=run, name="distca-tokenizing", daemon=True).start()
    return work


def _result_of(work: Future[list[str | None]]) -> list[str | None] | Exception | None:
    """Returns the tokens' prefixes, or the error that stopped their making; None while they are being made."""
    end = time.monotonic() + _BEAT_S
    while not work.done() and time.monotonic() < end:
        time.sleep(0.02)
    if not work.done():
        return None
    error = work.exception()
    if isinstance(error, DistcaError):
        return error
    return work.result()


def open_tokens(config: RunConfig, prefixes: Sequence[str | None]) -> DocumentSource:
    """The run's documents from the tokens of its sources.

    Raises:
        DataError: they are not there.
    """
    opened: list[DocumentSource] = []
    parts = ingredients(config)
    for each, prefix in zip(parts, prefixes, strict=True):
        if prefix is not None:
            _wait_until_seen(prefix)
        opened.append(
            open_source("indexed", each.path if prefix is None else prefix, vocabulary=config.data.vocabulary)
        )
    warn_of_tokenizers(config, opened)
    return Blend(opened, parts) if config.data.source == "blend" else opened[0]


def _wait_until_seen(prefix: str) -> None:
    """Wait for tokens that rank 0 made: a network file system may remember for a while that there were none."""
    last = Path(f"{prefix}.idx")  # a listing that has it has the others
    end, told = time.monotonic() + _SEEN_S, False
    while not _is_seen(last):
        if time.monotonic() > end:
            raise DataError(
                f"The tokens that rank 0 made at {prefix} are not there on this node, {_SEEN_S:.0f} s later; set "
                "`cache` to a folder that all nodes see."
            )
        if not told:
            logger.info("Waiting up to %.0f s until this node sees %s", _SEEN_S, last)
            told = True
        time.sleep(_LOOK_AGAIN_S)


def _is_seen(file: Path) -> bool:
    """Whether a file is there, by new listings of its folders: these make clients of NFS ask the server again."""
    for folder in (file.parents[1], file.parent):
        with suppress(OSError):
            os.listdir(folder)
    return file.is_file()


def warn_of_tokenizers(config: RunConfig, sources: Sequence[DocumentSource]) -> None:
    """Rank 0 warns where ids are of another tokenizer than the run's own, or where the run has none, than those of the
    first source.

    It is no error: a tokenizer that was saved again, or got more tokens, has another digest and the same ids.
    """
    made = [(f"{each.prefix}.bin", *each.tokenizer) for each in sources if isinstance(each, Indexed) and each.tokenizer]
    if not made or os.environ.get("RANK", "0") != "0":
        return
    known = [*_own_tokenizer(config.data.tokenizer), *made]
    for file, name, digest in made:
        if digest != known[0][2]:
            _warn_of_tokenizer(file, name, *known[0][:2])


@cache
def _warn_of_tokenizer(file: str, name: str, where: str, other: str) -> None:
    """Once: a run opens its documents to check them, and to train."""
    logger.warning(
        "%s was made with the tokenizer %s, but %s has another, %s: the same id may mean other text. "
        "Convert again with one tokenizer, unless you know that their ids are the same.",
        *(file, name, where, other),
    )


def _own_tokenizer(name: str) -> list[tuple[str, str, str]]:
    """(setting, name, digest) of the run's tokenizer; none for bytes, or where there is no such file: ids need none."""
    try:
        return [] if name == "bytes" else [("data.tokenizer", name, find_tokenizer(name).digest())]
    except (DataError, OSError):
        return []
