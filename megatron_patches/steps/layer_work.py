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

_MLPS = MLP + EXPERTS


def layer_works(config: TransformerConfig, pattern: str, recompute_segments: bool) -> list[LayerWork]:
    """Returns the counts of each unit with attention, summed over tensor-parallel ranks.

    Recurrent units are left out, as the planner does not count them. In a GPTModel each unit gets the mean count of
    MLPs and experts of all layers.

    Args:
        pattern: the layers of a HybridModel, a letter for each layer and "|" between stages; empty for a GPTModel.
        recompute_segments: whether backward recomputes everything but core attention. If False, backward recomputes
            the MLPs or experts that ``config.recompute_modules`` names, if ``config.recompute_granularity`` is set.
    """
    mlps, again = (_mlps_of_units(config, pattern, those) for those in (_MLPS, _recomputed_letters(config)))
    works = []
    for unit, mlp, mlp_again in zip(units_of(config, pattern), mlps, again, strict=True):
        if unit.symbol == ATTENTION:
            weights = mlp + _attention(config)
            works.append(LayerWork(weights, weights if recompute_segments else mlp_again))
    return works


def _mlps_of_units(config: TransformerConfig, pattern: str, those: str) -> list[int]:
    """Returns for each unit the weights of its MLPs and experts. Only modules whose letters are in ``those`` count."""
    if pattern:
        return [_weights_of(config, letters, those) for letters in _letters_of_mlps(pattern)]
    return [mlp_weights(config, those)] * config.num_layers


def _recomputed_letters(config: TransformerConfig) -> str:
    """Returns the letters of the modules that backward recomputes one by one, as Megatron's configuration asks."""
    named = (config.recompute_modules or ()) if config.recompute_granularity else ()
    return "".join(letter for letter, name in ((MLP, "mlp"), (EXPERTS, "moe")) if name in named)


def _letters_of_mlps(pattern: str) -> list[str]:
    """Returns for each unit the letters of its MLPs and experts, for example "--" and "E" for "-*-GE"."""
    found = []
    for stage in pattern.split(STAGE):
        before, first, *others = re.split(f"[{re.escape(MIXERS)}]", stage)
        found += [before + first, *others]
    return found


def _weights_of(config: TransformerConfig, letters: str, those: str) -> int:
    """Returns how many weights multiply a row in the modules ``letters``, of which only ``those`` count."""
    of = {MLP: weights_of_mlp, EXPERTS: expert_weights}
    return sum(of[letter](config) for letter in letters if letter in those)


def mlp_weights(config: TransformerConfig, those: str = _MLPS) -> int:
    """Returns the mean number, over all layers, of weights that multiply a row in MLP or experts, rounded down.

    ``those`` are the letters of the modules that count.
    """
    letters = "".join(EXPERTS if each else MLP for each in has_experts(config))
    return _weights_of(config, letters, those) // len(letters)


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
