"""The pattern of a HybridModel's layers: its units, and refusals of patterns that are not served.

Megatron-Core's HybridModel has a pattern with one symbol for each layer. A layer is one mixer (attention, a gated delta
net or Mamba), one MLP, or experts. A ``|`` stands between pipeline stages. A *unit* is a mixer with all layers behind
it up to the next mixer. So Qwen3.5's pattern ``G-G-G-*-`` has four units. Each layer of a GPTModel is a unit.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.transformer import TransformerConfig

from distca.errors import SupportError
from megatron_patches.model.recurrences import is_recurrent

ATTENTION, DELTA_NET, MAMBA, MLP, EXPERTS = "*", "G", "M", "-", "E"
RECURRENT = DELTA_NET + MAMBA
STAGE = "|"
_MIXERS = ATTENTION + RECURRENT
_SERVED = _MIXERS + MLP + EXPERTS
"""The symbols that are served, and those of mixers among them."""
_REFUSED = {
    "/": "only the next token is predicted: leave it out with what follows",
    "D": "sparse attention is not served: take '*'",
    "+": "latent attention is not served: take '*'",
}
"""Megatron's other symbols, with the end of the sentence that refuses them."""


@dataclass(frozen=True)
class Unit:
    """A unit, as the layer of its mixer.

    Attributes:
        symbol: the mixer's symbol in the pattern.
        layer_number: Megatron's number of the layer, from 1.
    """

    symbol: str
    layer_number: int


def units_of(config: TransformerConfig, pattern: str) -> list[Unit]:
    """Returns the units of a whole model, in order.

    Args:
        config: Megatron's configuration.
        pattern: the pattern of a HybridModel's layers; empty for a GPTModel.
    """
    if pattern:
        return [Unit(symbol, number) for number, symbol in enumerate(layers_of(pattern), 1) if symbol in _MIXERS]
    numbers = range(1, config.num_layers + 1)
    return [Unit(DELTA_NET if is_recurrent(config, number) else ATTENTION, number) for number in numbers]


def layers_of(pattern: str) -> str:
    """Returns the symbols of a pattern's layers, over all pipeline stages."""
    return pattern.replace(STAGE, "")


def check_pattern(config: TransformerConfig, pattern: str) -> None:
    """Refuses a pattern that is not served or does not fit the configuration.

    Raises:
        SupportError: the pattern has a wrong symbol or no attention, stages have different layers, or the numbers of
            layers, stages or experts differ from the configuration's.
    """
    layers, stages = layers_of(pattern), pattern.split(STAGE)
    for symbol in layers:
        if symbol not in _SERVED:
            why = _REFUSED.get(symbol, f"symbols are {' '.join(_SERVED)}")
            raise SupportError(f"hybrid_layer_pattern {pattern!r} has {symbol!r}, but {why}.")
    if ATTENTION not in pattern:
        raise SupportError(
            f"hybrid_layer_pattern {pattern!r} has no '*', but some layers must have softmax attention: add one."
        )
    if len(stages) != config.pipeline_model_parallel_size or len({*stages}) > 1:
        raise SupportError(
            f"hybrid_layer_pattern is {pattern!r}, but pipeline_model_parallel_size is "
            f"{config.pipeline_model_parallel_size}, and all stages have the same layers: put a '|' between stages of "
            "equal patterns, or change the number of stages."
        )
    if config.num_layers != len(layers):
        raise SupportError(
            f"num_layers is {config.num_layers}, but hybrid_layer_pattern {pattern!r} has {len(layers)} layers: set "
            f"num_layers to {len(layers)}."
        )
    if (EXPERTS in pattern) != bool(config.num_moe_experts):
        raise SupportError(
            f"num_moe_experts is {config.num_moe_experts}, but hybrid_layer_pattern is {pattern!r}: give a number of "
            "experts where the pattern has 'E', and None where it has not."
        )
    if MAMBA in pattern:
        _check_mamba(config)


def _check_mamba(config: TransformerConfig) -> None:
    """Refuses groups of Mamba-2's heads that cannot be divided over tensor-parallel ranks, or have unequal sizes."""
    tp, groups = config.tensor_model_parallel_size, config.mamba_num_groups
    if groups % tp:
        raise SupportError(
            f"mamba_num_groups is {groups}, which tensor_model_parallel_size {tp} does not divide, but a rank has "
            "whole groups: set one of them to match."
        )
    if config.mamba_num_heads is not None and config.mamba_num_heads % groups:
        raise SupportError(
            f"mamba_num_heads is {config.mamba_num_heads}, which is no multiple of mamba_num_groups {groups}: set it "
            "to one."
        )
