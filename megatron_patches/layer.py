"""A transformer layer cut at its core attention."""

from __future__ import annotations

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer.transformer_layer import TransformerLayer


class SplitTransformerLayer(TransformerLayer):
    """megatron's layer with its forward also available in two parts: before and after core attention.

    ``post(core_attention(pre(x)), x)`` equals ``forward(x)``; a test holds them together.
    """

    def pre(self, hidden: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm, QKV projection and RoPE.

        Args:
            hidden: [rows, 1, hidden], under sequence parallelism this rank's share of the rows.
            angles: [all rows, 1, 1, head_dim] rotary angles.

        Returns:
            q_NHD and kv_N2GD of all rows, for this rank's heads.
        """
        attention = self.self_attention
        query, key, value = attention.get_query_key_value_tensors(self.input_layernorm(hidden), None)[:3]
        group = attention.pg_collection.cp
        query = apply_rotary_pos_emb(query, angles, config=self.config, cp_group=group)
        key = apply_rotary_pos_emb(key, angles, config=self.config, cp_group=group)
        return query.squeeze(1), torch.stack((key.squeeze(1), value.squeeze(1)), dim=1)

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
