"""Counts the weights in matrix products of a model's layers.

The planner multiplies counts by seconds per weight and token. Biases and norms do not count. A *unit* is an attention
or recurrent layer, together with its MLPs and experts.
"""

from __future__ import annotations

import re

from megatron.core.transformer import TransformerConfig

from distca.plan.cost.linear import LayerWork, layer_weights
from megatron_patches.experts.spec import has_experts
from megatron_patches.model.latent import is_latent, latent_of
from megatron_patches.model.pattern import ATTENTION, EXPERTS, MIXERS, MLP, STAGE, units_of
from megatron_patches.model.recurrences import has_output_gate


def layer_works(config: TransformerConfig, pattern: str, recompute_segments: bool) -> list[LayerWork]:
    """Returns the counts of each unit with attention, summed over tensor-parallel ranks.

    In a GPTModel each unit gets the mean count of MLPs and experts of all layers.

    Args:
        pattern: the layers of a HybridModel, a letter for each layer and "|" between stages; empty for a GPTModel.
        recompute_segments: whether backward recomputes everything but core attention. If False, backward recomputes
            MLPs and experts if ``config.recompute_granularity`` is set, and else nothing.
    """
    units = units_of(config, pattern)
    if pattern:
        mlps = [sum(_weights_of(config, letter) for letter in letters) for letters in _letters_of_mlps(pattern)]
    else:
        mlps = [mlp_weights(config)] * len(units)
    works = []
    for unit, mlp in zip(units, mlps, strict=True):
        if unit.symbol != ATTENTION:
            continue
        weights = mlp + _attention(config)
        recomputed = weights if recompute_segments else mlp if config.recompute_granularity else 0
        works.append(LayerWork(weights, recomputed))
    return works


def _letters_of_mlps(pattern: str) -> list[str]:
    """Returns for each unit the letters of its MLPs and experts, for example "--" and "E" for "-*-GE"."""
    found = []
    for stage in pattern.split(STAGE):
        before, first, *others = re.split(f"[{re.escape(MIXERS)}]", stage)
        found += [before + first, *others]
    return found


def _weights_of(config: TransformerConfig, letter: str) -> int:
    return {MLP: weights_of_mlp, EXPERTS: expert_weights}[letter](config)


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


def _attention(config: TransformerConfig) -> int:
    hidden, heads = config.hidden_size, config.num_attention_heads
    if is_latent(config):
        latent = latent_of(config)
        return latent.inner_weights(hidden, heads) + hidden * heads * latent.value_dim
    assert config.num_query_groups is not None and config.kv_channels is not None
    gate = hidden * heads * config.kv_channels * has_output_gate(config)
    return layer_weights(hidden, 0, heads, config.num_query_groups, config.kv_channels) + gate
