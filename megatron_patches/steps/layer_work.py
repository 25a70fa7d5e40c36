"""The weights that each layer multiplies a row with beside core attention, by a model's configuration."""

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
    """Returns the work of each of the model's units.

    Args:
        config: Megatron's configuration.
        layer_kinds: the kinds of its layers, whose recurrences are those of a tensor-parallel rank.
        pattern: the pattern of a HybridModel's layers; empty for a GPTModel. Each of its layers counts with the mean of
            all MLPs and experts.
        tp: tensor-parallel ranks.
        recompute_segments: whether everything but cores is computed again, not MLPs alone.
    """
    units = units_of(config, pattern)
    recurrences = layer_kinds.recurrences or (None,) * len(units)
    works = []
    for unit, what in zip(units, recurrences, strict=True):
        mlp = _behind(config, layers_of(pattern)[unit.layer_number :][:1]) if pattern else mlp_weights(config)
        weights = mlp + (_attention(config) if what is None else _recurrent(config, what, tp))
        recomputed = weights if recompute_segments else mlp if config.recompute_granularity else 0
        core = NO_CORE if what is None else core_weights(what)
        works.append(LayerWork(what is None, weights, recomputed, CoreWeights(tp * core.forward, tp * core.backward)))
    return works


def _behind(config: TransformerConfig, symbol: str) -> int:
    """Weights of the layer behind a mixer, by its symbol."""
    return {MLP: weights_of_mlp, EXPERTS: expert_weights}[symbol](config) if symbol in (MLP, EXPERTS) else 0


def _attention(config: TransformerConfig) -> int:
    hidden, heads = config.hidden_size, config.num_attention_heads
    if is_latent(config):
        latent = latent_of(config)
        return latent.inner_weights(hidden, heads) + hidden * heads * latent.value_dim
    assert config.num_query_groups is not None and config.kv_channels is not None
    gate = hidden * heads * config.kv_channels * has_output_gate(config)
    return layer_weights(hidden, 0, heads, config.num_query_groups, config.kv_channels) + gate


def _recurrent(config: TransformerConfig, what: Recurrence, tp: int) -> int:
    """Weights of the input projection (channels, the output's gate, the core's gates) and of the output projection."""
    values, gates = what.heads * what.value_dim, what.heads * (2 if what.delta else 1)
    return int(config.hidden_size * tp * (what.channels + 2 * values + gates))
