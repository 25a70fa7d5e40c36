"""Weights that a row is multiplied by behind attention, by a model's configuration."""

from __future__ import annotations

from megatron.core.transformer import TransformerConfig

from megatron_patches.experts.spec import has_experts


def mlp_weights(config: TransformerConfig) -> int:
    """Weights of a layer's MLP, or of its router and those experts that a row goes to, in the mean over layers."""
    products = (2 + config.gated_linear_unit) * config.hidden_size
    assert config.ffn_hidden_size is not None
    mixtures = has_experts(config)
    dense = products * config.ffn_hidden_size
    return (sum(mixtures) * _of_experts(config, products) + mixtures.count(False) * dense) // len(mixtures)


def _of_experts(config: TransformerConfig, products: int) -> int:
    experts = config.num_moe_experts
    if not experts:
        return 0
    width = config.moe_router_topk * (config.moe_ffn_hidden_size or 0)
    shared = config.moe_shared_expert_intermediate_size or 0
    gate = bool(shared) and config.moe_shared_expert_gate
    return products * (width + shared) + config.hidden_size * (experts + gate)
