"""The parameters of layers in a hybrid stack, and their names in Megatron-Core's checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from distca.models.hybrid import ATTENTION, DELTA_NET, EXPERTS, MAMBA, MLP

_MIXERS: Final[dict[str, tuple[str, ...]]] = {
    DELTA_NET: (
        "input_layernorm.weight",
        *(f"self_attention.{name}" for name in ("in_proj.weight", "conv1d.weight", "dt_bias", "A_log")),
        *(f"self_attention.{name}" for name in ("out_norm.weight", "out_proj.weight")),
    ),
    MAMBA: (
        "norm.weight",
        *(f"mixer.{name}" for name in ("in_proj.weight", "conv1d_weight", "conv1d_bias", "dt_bias", "A_log", "D")),
        *(f"mixer.{name}" for name in ("norm.weight", "out_proj.weight")),
    ),
}
_IN_PARTS: Final = {
    "self_attention.in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"),
    "self_attention.conv1d.weight": ("query", "key", "value"),
    "mixer.in_proj.weight": ("z", "x", "B", "C", "dt"),
    "mixer.conv1d_weight": ("x", "B", "C"),
    "mixer.conv1d_bias": ("x", "B", "C"),
}
"""Parameters that are saved in parts, each under a key of its own."""
_NORMS: Final = {DELTA_NET: "self_attention.in_proj.layer_norm_weight", MAMBA: "mixer.in_proj.layer_norm_weight"}
_AROUND: Final = {
    ATTENTION: ("input_layernorm.", "self_attention."),
    **dict.fromkeys((MLP, EXPERTS), ("pre_mlp_layernorm.", "mlp.")),
}


def parameters_of(symbol: str, of_layer: Sequence[str]) -> list[str]:
    """The parameters of a layer.

    Args:
        symbol: the layer's symbol in the pattern.
        of_layer: those of a layer with attention and an MLP, as a GPTModel has it.
    """
    if symbol in _MIXERS:
        return list(_MIXERS[symbol])
    return [name for name in of_layer if name.startswith(_AROUND[symbol])]


def saved_as(symbol: str, parameter: str) -> tuple[str, ...]:
    """Keys under which a parameter of a recurrent layer is saved, in the order of its rows."""
    if parameter == _MIXERS[symbol][0]:
        return (_NORMS[symbol],)
    key = parameter.replace("conv1d_", "conv1d.")
    return tuple(f"{key}.{part}" for part in _IN_PARTS.get(parameter, ())) or (key,)
