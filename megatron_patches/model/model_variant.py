"""Turns a :class:`distca.models.shape.ModelShape` into those settings in which models may differ from LLaMA."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.activations import squared_relu

from distca.models.shape import ModelShape
from distca.plan.kinds import usual_scale
from megatron_patches.model.model_options import ModelOptions, QueryScaling, Rotary


def variant_fields(shape: ModelShape) -> dict[str, Any]:
    """Returns fields of TransformerConfig for ``shape.variant``, the model's differences from LLaMA."""
    variant = shape.variant
    activation, fused = {
        "silu": (torch.nn.functional.silu, variant.gated),  # Megatron fuses SiLU only with a gate
        "gelu": (partial(torch.nn.functional.gelu, approximate="tanh"), False),
        "relu2": (squared_relu, False),
    }[variant.activation]
    skipped = [int(number in variant.unrotated_layers) for number in range(shape.layers)]
    return {
        "normalization": variant.normalization,
        "layernorm_zero_centered_gamma": variant.zero_centered_norms,
        "activation_func": activation,
        "bias_activation_fusion": fused,
        "gated_linear_unit": variant.gated,
        # Megatron takes None as 1 / √head_dim.
        "softmax_scale": None if shape.softmax_scale == usual_scale(shape.resolved_head_dim) else shape.softmax_scale,
        "rotary_interleaved": variant.rotary_interleaved,
    } | ({"no_rope_freq": skipped} if any(skipped) else {})


def model_options(shape: ModelShape) -> ModelOptions:
    """Returns the settings that have no field in Megatron's configuration."""
    variant, hybrid = shape.variant, shape.hybrid
    scaling = QueryScaling(beta=variant.query_beta, original_length=variant.query_length)
    return ModelOptions(
        score_softcap=variant.score_softcap,
        rotations=_rotations(shape),
        query_scaling=scaling if variant.query_beta else None,
        norms=variant.norms,
        query_key_norm=variant.query_key_norm,
        norm_after_rotation=variant.norm_after_rotation,
        # If experts have biases, add_bias_linear is True, which gives attention's output projection a bias.
        attention_output_bias=variant.attention_output_bias and not shape.experts.biases,
        mlp_bias=variant.mlp_bias,
        # The supported models' LayerNorms have no bias. With RMSNorm only the default, True, is allowed.
        norm_bias=variant.normalization == "RMSNorm",
        parallel_mlp=variant.parallel_mlp,
        embedding_scale=variant.embedding_scale,
        residual_multiplier=variant.residual_multiplier,
        logit_multiplier=variant.logit_multiplier,
        final_softcap=variant.final_softcap,
        plain_recurrent_norm=hybrid.plain_norm,
        step_min=hybrid.step_min,
        latent_norm_epsilon=shape.latent.norm_epsilon,
    )


def cad_keywords(shape: ModelShape) -> dict[str, Any]:
    """Returns keyword arguments of ``distca.CAD``, the object that a training script makes."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return {
        "model_options": model_options(shape),
        "hybrid_layer_pattern": shape.hybrid.of_stages(shape.layers, stages),
    }


def _rotations(shape: ModelShape) -> tuple[Rotary | None, ...]:
    """Returns RoPE of each layer, with None for layers without RoPE.

    The result is () if the model's rotary embedding is right for all layers, or if a hybrid model has no RoPE.
    """
    variant = shape.variant
    if variant.turns_alike or not shape.hybrid.rotate:
        return ()
    usual = Rotary(base=shape.rope_base, scaling=shape.rope_scaling, percent=variant.rotary_percent)
    windowed = Rotary(base=variant.window_rope_base or shape.rope_base, percent=variant.rotary_percent)
    windows = (0,) * shape.layers if shape.hybrid.pattern else shape.windows
    rotations = [windowed if window and variant.window_rope_base else usual for window in windows]
    return tuple(None if number in variant.unrotated_layers else each for number, each in enumerate(rotations))
