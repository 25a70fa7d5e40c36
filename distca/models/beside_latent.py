"""The fields that a model with latent attention cannot have yet; training and the simulator refuse them alike."""

from __future__ import annotations

from distca.models.shape import ModelShape
from distca.models.variant import Variant
from distca.words import not_served


def not_with_latent(model: ModelShape) -> list[str]:
    """Returns a sentence for each field that models with latent attention cannot have yet; none for other models."""
    if not model.latent.kv_rank:
        return []
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
    }
    problems = not_served(found, "model.latent")
    if model.variant != Variant():
        problems.append("model.variant is not that of a LLaMA, which is not served with model.latent; leave it out.")
    return problems
