"""Settings of latent attention that cannot work."""

from __future__ import annotations

from distca.models.variant import Variant
from distca.train.config.schema import RunConfig


def latent_problems(config: RunConfig) -> list[str]:
    """Sentences on what cannot work, whatever the number of ranks."""
    latent, model = config.model.latent, config.model
    problems = [f"model.latent.{problem}" for problem in latent.problems()]
    if not latent.kv_rank:
        return problems
    if model.kv_heads != model.heads:
        problems.append(
            f"model.kv_heads is {model.kv_heads}, but with model.latent every head has keys and values; set it to "
            f"model.heads, {model.heads}."
        )
    if model.head_dim not in (0, latent.head_dim):
        problems.append(
            f"model.head_dim is {model.head_dim}, but model.latent.key_dim and rotary_dim make it {latent.head_dim}; "
            "leave it out."
        )
    return problems + _not_served(config)


def _not_served(config: RunConfig) -> list[str]:
    """Sentences on what other models can do, and those with latent attention cannot yet."""
    model, parallel, cad = config.model, config.parallel, config.cad
    found: dict[str, tuple[object, tuple[object, ...]]] = {
        "model.qk_norm": (model.qk_norm, (False,)),
        "model.qkv_bias": (model.qkv_bias, (False,)),
        "model.layer_types": (model.layer_types, (["full"],)),
        "model.sinks": (model.sinks, (False,)),
        "model.rope_scaling.kind": (model.rope_scaling.kind, ("none", "yarn")),
        "model.rope_scaling.truncate": (model.rope_scaling.truncate, (True,)),
        "model.hybrid.pattern": (model.hybrid.pattern, ("",)),
        "model.experts.biases": (model.experts.biases, (False,)),
        "model.experts.clamp": (model.experts.clamp, (0,)),
        "parallel.sequence_parallel": (parallel.sequence_parallel or parallel.tp == 1, (True,)),
        "cad.servers": (cad.servers, (0,)),
        "train.fp8": (config.train.fp8, ("none",)),
        "train.linears": (config.train.linears, ("auto", "local")),
    }
    problems = [
        f"{setting} is {_said(value)}, which is not served with model.latent; set it to "
        f"{' or '.join(map(_said, served))}."
        for setting, (value, served) in found.items()
        if value not in served
    ]
    if model.variant != Variant():
        problems.append("model.variant is not that of a LLaMA, which is not served with model.latent; leave it out.")
    return problems


def _said(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value) or "empty"
