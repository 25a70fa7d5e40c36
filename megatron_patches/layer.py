"""A transformer layer cut at its core attention."""

from __future__ import annotations

from functools import partial

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer

from distca.ops.discard_output import forget_until_backward
from distca.ops.rotary import Rotation, split_and_rotate
from megatron_patches.te.quantization import keeps_inputs


class SplitTransformerLayer(TransformerLayer):
    """megatron's layer with its forward also available in two parts: before and after core attention.

    ``post(core_attention(pre(x)), x)`` equals ``forward(x)``; a test holds them together.
    """

    def pre(self, hidden: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm, QKV projection, norms of query and key heads where there are any, and RoPE.

        Args:
            hidden: [rows, 1, hidden], under sequence parallelism this rank's share of the rows.
            rotation: of all rows.

        Returns:
            q_NHD and kv_N2GD of all rows, for this rank's heads.
        """
        attention = self.self_attention
        normed = self.input_layernorm(hidden)
        mixed, _ = attention.linear_qkv(normed)
        if keeps_inputs(attention.linear_qkv):
            forget_until_backward(normed, partial(self.input_layernorm.fill, hidden.detach()), mixed)
        mixed_NF = mixed.squeeze(1)
        if not isinstance(attention.q_layernorm, IdentityOp | None):
            mixed_NF = self._normalize_heads(mixed_NF)
        return split_and_rotate(mixed_NF, rotation, attention.num_query_groups_per_partition)

    def _normalize_heads(self, mixed_NF: torch.Tensor) -> torch.Tensor:
        """megatron's norms of each query head and of each key head, in the projection's own layout."""
        attention = self.self_attention
        shape = (attention.num_query_groups_per_partition, -1, attention.hidden_size_per_attention_head)
        heads = mixed_NF.unflatten(1, shape)
        q, k, v = heads[:, :, :-2], heads[:, :, -2:-1], heads[:, :, -1:]
        return torch.cat((attention.q_layernorm(q), attention.k_layernorm(k), v), dim=2).flatten(1)

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
        return self._mlp_and_residual(combine(projected, hidden, self.hidden_dropout))

    def _mlp_and_residual(self, hidden: torch.Tensor) -> torch.Tensor:
        """megatron's ``_forward_mlp``, but the norm's output is not kept for backward."""
        normed = self.pre_mlp_layernorm(hidden)
        if self.recompute_mlp:
            # The bias is a parameter, which a checkpointed function must not return.
            bias = self.mlp.linear_fc2.bias if self.config.add_bias_linear else None
            transformed = tensor_parallel.checkpoint(lambda x: self.mlp(x)[0], False, normed), bias
        else:
            transformed = self.mlp(normed)
        if self.recompute_mlp or keeps_inputs(self.mlp.linear_fc1):
            forget_until_backward(normed, partial(self.pre_mlp_layernorm.fill, hidden.detach()), transformed[0])
        combine = self.mlp_bda(self.training, self.config.bias_dropout_fusion)
        return combine(transformed, hidden, self.hidden_dropout)
