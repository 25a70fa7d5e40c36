"""Counts the weights that multiply a row (a token's hidden vector) in MLPs and experts, without biases and norms."""

from __future__ import annotations

from megatron.core.transformer import TransformerConfig

from megatron_patches.experts.spec import has_experts


def mlp_weights(config: TransformerConfig) -> int:
    """Returns the mean number, over all layers, of weights that multiply a row in MLP or experts, rounded down."""
    mixtures = has_experts(config)
    experts = sum(mixtures) * expert_weights(config)
    return (experts + mixtures.count(False) * weights_of_mlp(config)) // len(mixtures)


def weights_of_mlp(config: TransformerConfig) -> int:
    assert config.ffn_hidden_size is not None
    return _products(config) * config.ffn_hidden_size


def expert_weights(config: TransformerConfig) -> int:
    """Returns the number of weights that multiply a row in a layer with experts; 0 for a model without experts.

    These are the weights of the router, of the row's ``topk`` experts, and of the shared expert with its gate.
    """
    experts = config.num_moe_experts
    if not experts:
        return 0
    width = config.moe_router_topk * (config.moe_ffn_hidden_size or 0)
    shared = config.moe_shared_expert_intermediate_size or 0
    gate = bool(shared) and config.moe_shared_expert_gate
    return _products(config) * (width + shared) + config.hidden_size * (experts + gate)


def _products(config: TransformerConfig) -> int:
    """Returns an MLP's number of weights divided by its inner width."""
    return (2 + config.gated_linear_unit) * config.hidden_size
