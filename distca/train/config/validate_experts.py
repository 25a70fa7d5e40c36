"""Settings of models with experts that cannot work."""

from __future__ import annotations

from distca.train.config.schema import RunConfig
from distca.words import count


def expert_problems(config: RunConfig) -> list[str]:
    """Sentences on what cannot work, whatever the number of ranks."""
    experts, parallel = config.model.experts, config.parallel
    problems = [f"model.experts.{problem}" for problem in experts.problems(config.model.layers)]
    if not experts.count:
        if parallel.ep > 1:
            problems.append(
                f"parallel.ep is {parallel.ep}, but the model has no experts; set it to 1, or model.experts.count to "
                "a multiple of it."
            )
        return problems
    if experts.count % parallel.ep:
        problems.append(
            f"parallel.ep is {parallel.ep}, which does not divide the {experts.count} experts of a layer "
            "(model.experts.count), but each rank has equally many; change one."
        )
    if experts.shared_ffn % parallel.tp:
        problems.append(
            f"model.experts.shared_ffn {experts.shared_ffn} is not divisible by parallel.tp {parallel.tp}; change one."
        )
    if experts.biases and not (config.model.qkv_bias and config.model.variant.attention_output_bias):
        problems.append(
            "model.experts.biases is true, but the projections of attention have none; set model.qkv_bias and "
            "model.variant.attention_output_bias to true."
        )
    if parallel.tp > 1 and not parallel.sequence_parallel:
        problems.append(
            f"parallel.sequence_parallel is false with parallel.tp {parallel.tp}, but each rank sends rows of its own "
            "to the experts; set it to true, or parallel.tp to 1."
        )
    return problems + _not_served(config)


def _not_served(config: RunConfig) -> list[str]:
    """Sentences on what dense models can do, and models with experts cannot."""
    found: dict[str, tuple[object, object, str]] = {
        "model.variant.activation": (config.model.variant.activation, "silu", "experts are computed with silu"),
        "model.variant.gated": (config.model.variant.gated, True, "experts have gates"),
        "train.fp8": (config.train.fp8, "none", "experts are computed in the type of their weights"),
        "train.offload": (
            "none" if config.train.offload == "auto" else config.train.offload,
            "none",
            "what experts keep for backward is not moved to host memory",
        ),
    }
    return [
        f"{setting} is {_said(value)}, but {why}; set it to {_said(served)}, or model.experts.count to 0."
        for setting, (value, served, why) in found.items()
        if value != served
    ]


def _said(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def expert_ranks_problems(config: RunConfig, world_size: int) -> list[str]:
    """Sentences on what cannot work with so many ranks, which tensor parallelism and stages divide."""
    parallel = config.parallel
    ranks = world_size // parallel.pp
    if ranks % parallel.ep == 0:
        return []
    stage = f"the {count(ranks, 'rank')}" if parallel.pp == 1 else f"the {count(ranks, 'rank')} of a pipeline stage"
    return [
        f"parallel.ep is {parallel.ep}, which does not divide {stage}; give a divisor, or start another number of "
        "ranks."
    ]
