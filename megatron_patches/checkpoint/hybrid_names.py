"""Lists the parameters of a HybridModel's layers, and checkpoint keys for those of recurrent layers.

``whole_weights.py`` reads checkpoints without building the model, so it needs these lists. A layer of a HybridModel is
attention, a gated delta net, Mamba, an MLP or experts; each has a symbol. Gated delta nets and Mamba are *recurrent*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from distca.models.hybrid import ATTENTION, DELTA_NET, EXPERTS, MAMBA, MLP

_RECURRENT_LAYERS: Final[dict[str, tuple[str, ...]]] = {
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
"""The parameters of recurrent layers. The first of each layer is the norm before the gated delta net or Mamba."""
_IN_PARTS: Final = {
    "self_attention.in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"),
    "self_attention.conv1d.weight": ("query", "key", "value"),
    "mixer.in_proj.weight": ("z", "x", "B", "C", "dt"),
    "mixer.conv1d_weight": ("x", "B", "C"),
    "mixer.conv1d_bias": ("x", "B", "C"),
}
"""Parameters that a checkpoint stores as several tensors. Their keys end in these parts: ``in_proj.weight.z``."""
_NORM_KEYS: Final = {DELTA_NET: "self_attention.in_proj.layer_norm_weight", MAMBA: "mixer.in_proj.layer_norm_weight"}
"""The keys of the norms before a gated delta net or Mamba: a checkpoint names them after the linear that reads them."""
_PREFIXES: Final = {
    ATTENTION: ("input_layernorm.", "self_attention."),
    **dict.fromkeys((MLP, EXPERTS), ("pre_mlp_layernorm.", "mlp.")),
}
"""The beginnings of parameter names in layers that are not recurrent."""


def parameters_of(symbol: str, of_layer: Sequence[str]) -> list[str]:
    """Returns the names of the parameters of layers with this ``symbol``, without the prefix ``decoder.layers.N.``.

    ``of_layer`` are the names in a GPTModel's layer, which has attention, and an MLP or experts.
    """
    if symbol in _RECURRENT_LAYERS:
        return list(_RECURRENT_LAYERS[symbol])
    return [name for name in of_layer if name.startswith(_PREFIXES[symbol])]


def saved_as(symbol: str, parameter: str) -> tuple[str, ...]:
    """Returns the checkpoint's keys for a recurrent layer's parameter.

    Concatenated along the first dimension, the tensors with these keys are the parameter. Example:
    ``mixer.conv1d_bias`` has the keys ``mixer.conv1d.bias.x``, ``mixer.conv1d.bias.B`` and ``mixer.conv1d.bias.C``."""
    if parameter == _RECURRENT_LAYERS[symbol][0]:
        return (_NORM_KEYS[symbol],)
    key = parameter.replace("conv1d_", "conv1d.")
    return tuple(f"{key}.{part}" for part in _IN_PARTS.get(parameter, ())) or (key,)
