"""Counts the weights by which each of a model's layers multiplies a row: its work beside core attention.

The planner multiplies these counts by measured seconds per weight. So it can give all ranks about equal time in linear
layers and attention together. A *unit* is an attention or recurrent layer with the MLPs behind it. That is one layer of
a GPTModel, where experts may take the MLP's place. In a HybridModel each MLP is a layer of its own.
"""

from __future__ import annotations

from megatron.core.transformer import TransformerConfig

from distca.plan.cost.linear import LayerWork, layer_weights
from distca.plan.cost.recurrent import NO_CORE, CoreWeights, core_weights
from distca.recurrent import Recurrence
from megatron_patches.experts.weights import expert_weights, mlp_weights, weights_of_mlp
from megatron_patches.model.latent import is_latent, latent_of
from megatron_patches.model.layer_kinds import LayerKinds
from megatron_patches.model.pattern import EXPERTS, MLP, layers_of, units_of
from megatron_patches.model.recurrences import has_output_gate


def layer_works(
    config: TransformerConfig, layer_kinds: LayerKinds, pattern: str, tp: int, recompute_segments: bool
) -> list[LayerWork]:
    """Returns the work of each of the model's units, over all tensor-parallel ranks.

    Args:
        config: Megatron's configuration.
        layer_kinds: the kinds of the model's layers; recurrences count the heads of one tensor-parallel rank.
        pattern: the layers of a HybridModel, a letter each; empty for a GPTModel. All layers of a GPTModel count with
            the mean weights of its MLPs and experts.
        tp: number of tensor-parallel ranks.
        recompute_segments: whether backward computes everything but core attention again. False leaves Megatron's own
            recomputation, which recomputes MLPs or nothing.
    """
    units, layers = units_of(config, pattern), layers_of(pattern)
    recurrences = layer_kinds.recurrences or (None,) * len(units)
    ends = [unit.layer_number - 1 for unit in units[1:]] + [len(layers)]
    works = []
    for unit, end, what in zip(units, ends, recurrences, strict=True):
        behind = layers[unit.layer_number : end]  # the letters of the MLPs up to the next unit
        mlp = sum(_weights_of(config, letter) for letter in behind) if pattern else mlp_weights(config)
        weights = mlp + (_attention(config) if what is None else _recurrent(config, what, tp))
        recomputed = weights if recompute_segments else mlp if config.recompute_granularity else 0
        core = NO_CORE if what is None else core_weights(what)
        works.append(LayerWork(what is None, weights, recomputed, CoreWeights(tp * core.forward, tp * core.backward)))
    return works


def _weights_of(config: TransformerConfig, letter: str) -> int:
    """Returns the weights of an MLP or a layer of experts, by its letter."""
    return {MLP: weights_of_mlp, EXPERTS: expert_weights}[letter](config)


def _attention(config: TransformerConfig) -> int:
    """Returns the weights of the projections before and behind core attention."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if is_latent(config):
        latent = latent_of(config)
        return latent.inner_weights(hidden, heads) + hidden * heads * latent.value_dim
    assert config.num_query_groups is not None and config.kv_channels is not None
    gate = hidden * heads * config.kv_channels * has_output_gate(config)
    return layer_weights(hidden, 0, heads, config.num_query_groups, config.kv_channels) + gate


def _recurrent(config: TransformerConfig, what: Recurrence, tp: int) -> int:
    """Returns the weights of the projections before and behind a recurrent layer's core.

    The input projection yields the convolution's channels, the output's gate, and one or two gates for each head."""
    values, gates = what.heads * what.value_dim, what.heads * (2 if what.delta else 1)
    return int(config.hidden_size * tp * (what.channels + 2 * values + gates))
