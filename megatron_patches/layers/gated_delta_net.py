"""Megatron's gated delta net without fla's kernels, whose work is done by ours; Megatron-Core 0.19 has it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NoReturn
from unittest.mock import patch

from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common
from megatron.core.transformer import ModuleSpec

from distca.errors import SupportError
from megatron_patches.layers.hybrid_layers import SplitRecurrentLayer


class OwnGatedDeltaNet(GatedDeltaNet):
    """megatron's module, of which the layer calls all but the convolution and the delta rule."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        with patch.object(common, "HAVE_FLA", True):
            super().__init__(*arguments, **named)

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule = _never_called

    def forward(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        """Refuses to run.

        Raises:
            SupportError: always.
        """
        _never_called()


def _never_called(*_: Any, **__: Any) -> NoReturn:
    raise SupportError("A gated delta net was called by itself: run its layer in a model that CAD attached.")


def recurrent_layer_spec(attention_layer: ModuleSpec, column: type, row: type, norm: type) -> ModuleSpec:
    """The spec of a layer with a gated delta net, from that of one with attention.

    Args:
        attention_layer: as the block has it.
        column: class of linear layers that are split by outputs.
        row: class of those that are split by inputs.
        norm: class of the norm of each output head.
    """
    layer = deepcopy(attention_layer)
    layer.module = SplitRecurrentLayer
    layer.submodules.self_attention = ModuleSpec(
        module=OwnGatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(in_proj=column, out_norm=norm, out_proj=row),
    )
    # Checkpoints name norms as if they were in the linear layers.
    names = layer.submodules.sharded_state_dict_keys_map
    layer.submodules.sharded_state_dict_keys_map = {
        key: name.replace("linear_qkv", "in_proj") for key, name in names.items()
    }
    return layer
