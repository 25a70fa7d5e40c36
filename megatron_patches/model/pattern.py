"""Splits the pattern of a HybridModel's layers into units, and refuses patterns that are not supported.

Megatron-Core's HybridModel has a pattern with one symbol for each layer, and a ``|`` between pipeline stages. A layer
is a mixer (attention, a gated delta net or Mamba), an MLP, or experts. A *unit* is a mixer with the MLPs and experts
that follow it. A stage's first unit also has those ahead of its mixer. Example: Qwen3.5's pattern ``G-G-G-*-`` has four
units. In a GPTModel each layer is a unit.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.transformer import TransformerConfig

from distca.errors import SupportError
from megatron_patches.model.recurrences import is_recurrent, mamba_heads

ATTENTION, DELTA_NET, MAMBA, MLP, EXPERTS = "*", "G", "M", "-", "E"
RECURRENT = DELTA_NET + MAMBA
STAGE = "|"
MIXERS = ATTENTION + RECURRENT
_SUPPORTED = MIXERS + MLP + EXPERTS
_REFUSED = {
    "/": "only the next token is predicted: leave out '/' and all that follows",
    "D": "sparse attention is not supported: take '*'",
    "+": "latent attention is not supported: take '*'",
}
"""For symbols of Megatron that are not supported, the second half of the error message."""


@dataclass(frozen=True)
class MixerLayer:
    """The mixer of one unit.

    Attributes:
        symbol: symbol of the mixer.
        layer_number: number of the mixer among all layers of the model, from 1; in ``*-G-`` the G has 3.
    """

    symbol: str
    layer_number: int


def units_of(config: TransformerConfig, pattern: str) -> list[MixerLayer]:
    """Returns the mixer of each unit of a whole model; ``pattern`` is empty for a GPTModel."""
    if pattern:
        return [MixerLayer(symbol, number) for number, symbol in enumerate(layers_of(pattern), 1) if symbol in MIXERS]
    numbers = range(1, config.num_layers + 1)
    return [MixerLayer(DELTA_NET if is_recurrent(config, number) else ATTENTION, number) for number in numbers]


def layers_of(pattern: str) -> str:
    """Returns a pattern without ``|``."""
    return pattern.replace(STAGE, "")


def check_pattern(config: TransformerConfig, pattern: str) -> None:
    """Refuses a pattern that is not supported or does not fit the configuration.

    Raises:
        SupportError: the pattern has an unsupported symbol or no attention; stages have different layers; the number of
            layers, the number of stages or ``num_moe_experts`` does not fit the pattern; or Mamba-2's groups or heads
            cannot be divided evenly, or its heads or states have no elements.
    """
    layers, stages = layers_of(pattern), pattern.split(STAGE)
    for symbol in layers:
        if symbol not in _SUPPORTED:
            why = _REFUSED.get(symbol, f"symbols are {' '.join(_SUPPORTED)}")
            raise SupportError(f"hybrid_layer_pattern {pattern!r} has {symbol!r}, but {why}.")
    if ATTENTION not in pattern:
        raise SupportError(
            f"hybrid_layer_pattern {pattern!r} has no '*', but some layers must have softmax attention: add one."
        )
    if len(stages) != config.pipeline_model_parallel_size or len({*stages}) > 1:
        raise SupportError(
            f"hybrid_layer_pattern is {pattern!r}, but pipeline_model_parallel_size is "
            f"{config.pipeline_model_parallel_size}, and all stages must have the same layers: put a '|' between "
            "stages of equal patterns, or change the number of stages."
        )
    if config.num_layers != len(layers):
        raise SupportError(
            f"num_layers is {config.num_layers}, but hybrid_layer_pattern {pattern!r} has {len(layers)} layers: set "
            f"num_layers to {len(layers)}."
        )
    if (EXPERTS in pattern) != bool(config.num_moe_experts):
        raise SupportError(
            f"num_moe_experts is {config.num_moe_experts}, but hybrid_layer_pattern is {pattern!r}: give a number of "
            "experts if the pattern has 'E', else None."
        )
    if MAMBA in pattern:
        _check_mamba(config)


def _check_mamba(config: TransformerConfig) -> None:
    tp, groups = config.tensor_model_parallel_size, config.mamba_num_groups
    if groups < 1 or groups % tp:
        raise SupportError(
            f"mamba_num_groups is {groups}, but must be a multiple of tensor_model_parallel_size {tp}, as a rank has "
            "whole groups: change one of the two settings."
        )
    for name in ("mamba_head_dim", "mamba_state_dim"):
        if getattr(config, name) < 1:
            raise SupportError(f"{name} is {getattr(config, name)}: set it to at least 1.")
    heads = mamba_heads(config)
    if heads < 1 or heads % groups:
        raise SupportError(
            f"mamba_num_heads is {heads}, but must be a multiple of mamba_num_groups {groups}: change one of the two "
            f"settings; where mamba_num_heads is None, it is 2 * hidden_size / mamba_head_dim {config.mamba_head_dim}."
        )
