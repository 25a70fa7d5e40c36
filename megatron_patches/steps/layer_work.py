"""Counts the weights in matrix products of a model's layers.

The planner multiplies counts by seconds per weight and token. A *unit* is an attention or recurrent layer, together
with its MLPs and experts.
"""

from __future__ import annotations

import re

from megatron.core.transformer import TransformerConfig

from distca.plan.cost.linear import LayerWork, layer_weights
from megatron_patches.experts.weights import expert_weights, mlp_weights, weights_of_mlp
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


def _attention(config: TransformerConfig) -> int:
    hidden, heads = config.hidden_size, config.num_attention_heads
    if is_latent(config):
        latent = latent_of(config)
        return latent.inner_weights(hidden, heads) + hidden * heads * latent.value_dim
    assert config.num_query_groups is not None and config.kv_channels is not None
    gate = hidden * heads * config.kv_channels * has_output_gate(config)
    return layer_weights(hidden, 0, heads, config.num_query_groups, config.kv_channels) + gate
