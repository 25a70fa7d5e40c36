"""Settings of hybrid stacks that cannot work."""

from __future__ import annotations

from dataclasses import replace

from distca.models.hybrid import DELTA_NET, EXPERTS, RECURRENT
from distca.models.shape import ModelShape
from distca.models.variant import Variant
from distca.train.config.schema import RunConfig


def hybrid_problems(config: RunConfig) -> list[str]:
    """Sentences on what cannot work, whatever the number of ranks."""
    hybrid, model, tp = config.model.hybrid, config.model, config.parallel.tp
    problems = [f"model.hybrid.{problem}" for problem in hybrid.problems(model.layers)]
    if not hybrid.pattern or problems:
        return problems
    if (EXPERTS in hybrid.pattern) != bool(model.experts.count):
        problems.append(
            f"model.experts.count is {model.experts.count}, but model.hybrid.pattern is {hybrid.pattern!r}; give "
            "experts where it has E, and none where it has not."
        )
    stages = hybrid.of_stages(model.layers, config.parallel.pp).split("|")
    if len({*stages}) > 1:
        problems.append(
            f"model.hybrid.pattern is {hybrid.pattern!r}, which gives the {config.parallel.pp} stages of parallel.pp "
            f"unlike layers ({' and '.join(dict.fromkeys(stages))}); change one, so that all have the same."
        )
    if {*RECURRENT} & {*hybrid.pattern} and hybrid.key_heads % tp:
        problems.append(f"model.hybrid.key_heads {hybrid.key_heads} is not divisible by parallel.tp {tp}; change one.")
    return problems + _not_served(config)


def _not_served(config: RunConfig) -> list[str]:
    """Sentences on what other models can do, and hybrid stacks cannot yet."""
    model, train, hybrid = config.model, config.train, config.model.hybrid
    variant = model.variant
    known = {name: getattr(variant, name) for name in ("activation", "gated", "zero_centered_norms", "rotary_percent")}
    found: dict[str, tuple[object, object]] = {
        "parallel.pp": (1 if config.cad.enabled else config.parallel.pp, 1),
        "parallel.sequence_parallel": (config.parallel.sequence_parallel or config.parallel.tp == 1, True),
        "train.offload": ("none" if train.offload == "auto" else train.offload, "none"),
        "train.fp8": (train.fp8, "none"),
        "model.layer_types": (model.layer_types, ["full"]),
        "model.sinks": (model.sinks, False),
        "model.experts.dense_layers": (model.experts.dense_layers, 0),
    }
    if not hybrid.rotate:
        found["model.rope_scaling.kind"] = model.rope_scaling.kind, "none"
        found["model.rope_base"] = model.rope_base, ModelShape.rope_base
    if DELTA_NET in hybrid.pattern:
        found["model.variant.activation"] = (variant.activation, "silu")
    problems = [
        f"{setting} is {_said(value)}, which is not served with model.hybrid.pattern; set it to {_said(served)}."
        for setting, (value, served) in found.items()
        if value != served
    ]
    if replace(Variant(), **known) != variant:
        problems.append(
            "model.variant has more than activation, gated, zero_centered_norms and rotary_percent, which is not "
            "served with model.hybrid.pattern; leave it out."
        )
    return problems


def _said(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
