"""The fields that a model with latent attention cannot have yet; training and the simulator refuse them alike."""

from __future__ import annotations

from distca.models.shape import ModelShape
from distca.models.variant import Variant
from distca.words import not_served

LATENT = "latent attention"
"""The name of such models' attention in sentences."""


def not_with_latent(model: ModelShape) -> list[str]:
    """Returns a sentence for each field that models with latent attention cannot have yet; none for other models. Each
    begins with the field's name."""
    if not model.latent.kv_rank:
        return []
    found: dict[str, tuple[object, tuple[object, ...]]] = {
        "qk_norm": (model.qk_norm, (False,)),
        "qkv_bias": (model.qkv_bias, (False,)),
        "layer_types": (model.layer_types, (["full"],)),
        "sinks": (model.sinks, (False,)),
        "rope_scaling.kind": (model.rope_scaling.kind, ("none", "yarn")),
        "rope_scaling.truncate": (model.rope_scaling.truncate, (True,)),
        "hybrid.pattern": (model.hybrid.pattern, ("",)),
        "experts.biases": (model.experts.biases, (False,)),
        "experts.clamp": (model.experts.clamp, (0,)),
    }
    problems = not_served(found, LATENT)
    if model.variant != Variant():
        problems.append(f"variant is not that of a LLaMA, which is not served with {LATENT}; leave it out.")
    return problems
