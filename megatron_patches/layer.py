"""A transformer layer cut at its core attention."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_patches.rotary import Rotation, split_and_rotate


class SplitTransformerLayer(TransformerLayer):
    """megatron's layer with its forward also available in two parts: before and after core attention.

    ``post(core_attention(pre(x)), x)`` equals ``forward(x)``; a test holds them together.
    """

    def pre(self, hidden: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm, QKV projection and RoPE.

        Args:
            hidden: [rows, 1, hidden], under sequence parallelism this rank's share of the rows.
            rotation: of all rows.

        Returns:
            q_NHD and kv_N2GD of all rows, for this rank's heads.
        """
        attention = self.self_attention
        mixed, _ = attention.linear_qkv(self.input_layernorm(hidden))
        return split_and_rotate(mixed.squeeze(1), rotation, attention.num_query_groups_per_partition)

    def post(self, o_NHD: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Output projection, residual and MLP.

        Args:
            o_NHD: core attention's output for all rows and this rank's heads.
            hidden: what :meth:`pre` was given.

        Returns:
            [rows, 1, hidden], the layer's output.
        """
        projected = self.self_attention.linear_proj(o_NHD.flatten(1).unsqueeze(1))
        combine = self.self_attn_bda(self.training, self.config.bias_dropout_fusion)
        return self._forward_mlp(combine(projected, hidden, self.hidden_dropout))
