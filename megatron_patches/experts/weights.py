"""Weights that a row is multiplied by behind attention, by a model's configuration."""

from __future__ import annotations

from megatron.core.transformer import TransformerConfig

from megatron_patches.experts.spec import has_experts


def mlp_weights(config: TransformerConfig) -> int:
    """Weights of a layer's MLP, or of its router and those experts that a row goes to, in the mean over layers."""
    mixtures = has_experts(config)
    experts = sum(mixtures) * expert_weights(config)
    return (experts + mixtures.count(False) * weights_of_mlp(config)) // len(mixtures)


def weights_of_mlp(config: TransformerConfig) -> int:
    """Weights of a layer's MLP."""
    assert config.ffn_hidden_size is not None
    return _products(config) * config.ffn_hidden_size


def expert_weights(config: TransformerConfig) -> int:
    """Weights of a layer's router and of those experts that a row goes to; 0 without experts."""
    experts = config.num_moe_experts
    if not experts:
        return 0
    width = config.moe_router_topk * (config.moe_ffn_hidden_size or 0)
    shared = config.moe_shared_expert_intermediate_size or 0
    gate = bool(shared) and config.moe_shared_expert_gate
    return _products(config) * (width + shared) + config.hidden_size * (experts + gate)


def _products(config: TransformerConfig) -> int:
    return (2 + config.gated_linear_unit) * config.hidden_size
