"""Builds Megatron-Core 0.19's gated delta net without the package fla, and makes the spec of its layer.

A gated delta net is a recurrence in place of softmax attention. Megatron's module supplies weights, projections and
norm. ``distca/recurrent`` computes the convolution and the recurrence. On GPUs it calls fla for the recurrence;
on CPUs nothing needs fla.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NoReturn
from unittest.mock import patch

from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common
from megatron.core.transformer import ModuleSpec

from distca.errors import SupportError
from megatron_patches.layers.hybrid_layers import SplitRecurrentLayer


class OwnGatedDeltaNet(GatedDeltaNet):
    """Megatron's module without its forward. :class:`SplitRecurrentLayer` calls the projections and norm directly."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        with patch.object(common, "HAVE_FLA", True):  # else Megatron's constructor refuses to build the module
            super().__init__(*arguments, **named)

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        # Without fla this is None, which Megatron's constructor refuses. Only Megatron's own forward would call it.
        self.gated_delta_rule = _never_called

    def forward(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        _never_called()


def _never_called(*_: Any, **__: Any) -> NoReturn:
    raise SupportError("A gated delta net cannot be called alone: give the model to CAD.attach, and call the model.")


def recurrent_layer_spec(attention_layer: ModuleSpec, column: type, row: type, norm: type) -> ModuleSpec:
    """Returns the spec of a layer with a gated delta net, from the spec of a layer with attention.

    Args:
        column, row: classes of column-parallel and of row-parallel linear layers.
        norm: class of the output's norm, which works on each head.
    """
    layer = deepcopy(attention_layer)
    layer.module = SplitRecurrentLayer
    layer.submodules.self_attention = ModuleSpec(
        module=OwnGatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(in_proj=column, out_norm=norm, out_proj=row),
    )
    # Megatron's checkpoints name a norm after the linear layer that reads the norm's output.
    names = layer.submodules.sharded_state_dict_keys_map
    layer.submodules.sharded_state_dict_keys_map = {
        key: name.replace("linear_qkv", "in_proj") for key, name in names.items()
    }
    return layer
