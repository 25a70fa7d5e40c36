"""Counts the weights of MLPs and experts by which a row (a token's hidden vector) is multiplied.

From these counts the time of linear layers is predicted (``steps/layer_work.py``). Biases and norms are not counted.
"""

from __future__ import annotations

from megatron.core.transformer import TransformerConfig

from megatron_patches.experts.spec import has_experts


def mlp_weights(config: TransformerConfig) -> int:
    """Returns the number of weights by which a row is multiplied in a layer's MLP or experts, as a mean over layers."""
    mixtures = has_experts(config)
    experts = sum(mixtures) * expert_weights(config)
    return (experts + mixtures.count(False) * weights_of_mlp(config)) // len(mixtures)


def weights_of_mlp(config: TransformerConfig) -> int:
    """Returns the number of weights of a layer's MLP."""
    assert config.ffn_hidden_size is not None
    return _products(config) * config.ffn_hidden_size


def expert_weights(config: TransformerConfig) -> int:
    """Returns the number of weights by which a row is multiplied in a layer with experts: the weights of the router, of
    the row's ``topk`` experts, and of the shared expert with its gate. 0 for a model without experts."""
    experts = config.num_moe_experts
    if not experts:
        return 0
    width = config.moe_router_topk * (config.moe_ffn_hidden_size or 0)
    shared = config.moe_shared_expert_intermediate_size or 0
    gate = bool(shared) and config.moe_shared_expert_gate
    return _products(config) * (width + shared) + config.hidden_size * (experts + gate)


def _products(config: TransformerConfig) -> int:
    """Returns the number of an MLP's weights for each channel between its two products."""
    return (2 + config.gated_linear_unit) * config.hidden_size
