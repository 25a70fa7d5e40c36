"""Transformer layers of hybrid models such as Qwen3.5: with a gated delta net, or with a gate on attention's output.

A gated delta net is a convolution and a recurrence in place of attention. These two are the *core* of such a layer. In
other layers the core is softmax(QKᵀ)V. Rows travel between ranks for the core. ``pre`` computes everything before the
core, and ``mixed`` everything behind the core up to the output projection.

Shape suffixes: N rows (tokens), F columns of the input or QKV projection, C channels of the convolution. H query heads,
or output heads of the recurrence; G key/value heads, D head_dim, V elements of an output head; 2 stands for keys and
values.
"""

from __future__ import annotations

from functools import cached_property

import torch
from megatron.core.transformer import TransformerConfig

from distca.ops.rotary import Rotation
from distca.recurrent import CoreParameters, Recurrence, RecurrentKernel, choose_recurrent_kernel
from megatron_patches.layers.latent import LatentLayer
from megatron_patches.layers.layer import Branch, SplitTransformerLayer
from megatron_patches.model.latent import is_latent
from megatron_patches.model.recurrences import has_output_gate, is_recurrent, recurrence_of


class SplitRecurrentLayer(SplitTransformerLayer):
    """A layer with Megatron's gated delta net."""

    @cached_property
    def recurrence(self) -> Recurrence:
        return recurrence_of(self.config)

    @cached_property
    def core_kernel(self) -> RecurrentKernel:
        weight = self.self_attention.conv1d.weight
        return choose_recurrent_kernel(self.recurrence, weight.device, weight.dtype)

    @property
    def core_parameters(self) -> CoreParameters:
        return CoreParameters(self.self_attention.conv1d.weight.squeeze(1))

    def pre(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """Computes the norm and the projection of ``hidden``, [rows, 1, hidden].

        Returns:
            ``hidden`` and the output gate for :meth:`mixed`, then the core's inputs mixed_NC, g_NH and beta_NH.
            mixed_NC is q, k and v before the convolution. Each row multiplies the recurrent state by exp(g_NH), and
            then updates the state with the weight beta_NH.
        """
        net = self.self_attention
        hidden, projected_NF = self._projected(hidden, net.in_proj)
        mixed_NC, *others = projected_NF.split(net.feat_dim_split, dim=1)
        gate, beta_NH, alpha_NH = (each.contiguous() for each in others)  # A view would keep projected_NF in memory.
        g_NH, beta_NH = net._compute_g_and_beta(net.A_log, net.dt_bias, alpha_NH, beta_NH)
        return hidden, gate, mixed_NC, g_NH, beta_NH

    def mixed(self, o: torch.Tensor, *residual: torch.Tensor) -> tuple[Branch, torch.Tensor]:
        """Applies the gated norm of each head and the output projection to ``o``, the core's output o_NHV.

        Returns:
            The projection's output, and the residual to which it is added.
        """
        net, (hidden, gate) = self.self_attention, residual
        normed = net._apply_gated_norm(o, gate.unflatten(1, o.shape[1:]))
        return net.out_proj(normed.view(len(o), 1, gate.shape[1])), hidden


class GatedAttentionLayer(SplitTransformerLayer):
    """A layer whose attention output is multiplied by the sigmoid of a gate.

    For each key/value head the QKV projection returns queries, gates, key and value, in this order.
    """

    def pre(self, hidden: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """Returns ``hidden`` and the gate for :meth:`mixed`, then q_NHD and kv_N2GD for core attention."""
        attention = self.self_attention
        hidden, mixed_NF = self._projected(hidden, attention.linear_qkv)
        groups, width = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
        heads = mixed_NF.unflatten(1, (groups, -1, width))
        queries = heads.shape[2] // 2 - 1  # shape[2] is queries, as many gates, one key and one value
        q, gate, kv = heads.split((queries, queries, 2), dim=2)
        gate = gate.clone(memory_format=torch.contiguous_format)  # A view would keep mixed_NF in memory.
        return hidden, gate.flatten(1), *self._heads(torch.cat((q, kv), dim=2).flatten(1), rotation)

    def mixed(self, o: torch.Tensor, *residual: torch.Tensor) -> tuple[Branch, torch.Tensor]:
        """Multiplies ``o`` by the gate's sigmoid, in float32 as Megatron does, and applies the output projection."""
        hidden, gate = residual
        return super().mixed(self.self_attention._apply_output_gate(o, gate), hidden)


def layer_class(config: TransformerConfig, layer_number: int) -> type[SplitTransformerLayer]:
    """Returns this project's class for a GPTModel's layer; ``layer_number`` begins with 1."""
    if is_recurrent(config, layer_number):
        return SplitRecurrentLayer
    if is_latent(config):
        return LatentLayer
    return GatedAttentionLayer if has_output_gate(config) else SplitTransformerLayer
