"""A transformer layer cut at its core attention."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer

from distca.ops.discard_output import forget_until_backward
from distca.ops.rotary import Rotation, split_and_rotate
from distca.runtime.server import keys_and_values
from megatron_patches.experts.balance import Half
from megatron_patches.experts.layer import HalvesLayer
from megatron_patches.layers.rotations import RowRotations
from megatron_patches.model.model_options import MEGATRONS, ModelOptions
from megatron_patches.patches.fused_ops import SwigluMLP
from megatron_patches.patches.norms import RMSNorm, norm_class
from megatron_patches.steps.batch_context import PackedMicroBatch
from megatron_patches.te.quantization import keeps_inputs

Branch = tuple[torch.Tensor, torch.Tensor | None]
"""The output of a mixer or an MLP before it is added to the residual, and its bias where it has one."""


class SplitLayerParts:
    """The steps around a mixer, for Megatron's layers with attention and those without."""

    options = MEGATRONS
    keeps_outputs = False
    config: TransformerConfig
    training: bool
    hidden_dropout: float
    input_layernorm: Any

    def mixed(self, o: torch.Tensor, *residual: torch.Tensor) -> tuple[Branch, torch.Tensor]:
        """Returns the output projection of the core's output, and the residual to which it is to be added.

        Args:
            o: the core's output for all rows and this rank's heads.
            residual: the tensors that the layer's ``pre`` returned for it.
        """
        raise NotImplementedError

    def _projected(self, hidden: torch.Tensor, linear: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``hidden`` for the residual, and the outputs of the mixer's projection for the rows of all
        sequence-parallel ranks."""
        hidden, normed = beside(self.input_layernorm, hidden)
        mixed, _ = linear(normed)
        if keeps_inputs(linear):
            self._forget_norm(self.input_layernorm, hidden, normed, mixed)
        return hidden, mixed.squeeze(1)

    def _forget_norm(self, norm: Any, hidden: torch.Tensor, normed: torch.Tensor, used: torch.Tensor) -> None:
        if normed is not hidden and not self.keeps_outputs:  # without a norm, normed is hidden itself
            forget_until_backward(normed, partial(norm.fill, hidden.detach()), used)

    def _add(self, branch: Branch, residual: torch.Tensor, combine: Any, norm: Any) -> torch.Tensor:
        """Returns the residual plus the output of attention or the MLP, with its bias, norm and multiplier."""
        multiplier = self.options.residual_multiplier
        if norm is not None or multiplier != 1.0:
            output, bias = branch
            output = output if bias is None else output + bias
            output = output if norm is None else norm(output)
            branch = output if multiplier == 1.0 else output * multiplier, None
        added: torch.Tensor = combine(self.training, self.config.bias_dropout_fusion)(
            branch, residual, self.hidden_dropout
        )
        return added


class SplitTransformerLayer(SplitLayerParts, TransformerLayer):
    """megatron's layer in two parts, before and after core attention, with the additions of :class:`ModelOptions`.

    With core attention at home :meth:`forward` is ``post(core_attention(pre(x)), x)``. Unless the layer
    ``keeps_outputs``, outputs of norms are computed again in backward.
    """

    def __init__(
        self, config: TransformerConfig, *arguments: Any, options: ModelOptions = MEGATRONS, **named: Any
    ) -> None:
        super().__init__(config, *arguments, **named)
        self.options = options
        self.post_attention_layernorm = self.post_mlp_layernorm = None
        if options.norms != "pre":
            norm, size = norm_class(config, options.norm_bias), config.hidden_size
            self.post_attention_layernorm = norm(config, size, config.layernorm_epsilon)
            self.post_mlp_layernorm = norm(config, size, config.layernorm_epsilon)

    def pre(self, hidden: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Computes the norm, the QKV projection, norms of queries and keys where there are any, and RoPE.

        Args:
            hidden: [rows, 1, hidden], under sequence parallelism this rank's part of the rows.
            rotation: rotations of all rows.

        Returns:
            ``hidden`` for :meth:`post`, so that its gradients of both paths are added in one pass; q_NHD and kv_N2GD of
            all rows, for this rank's heads.
        """
        hidden, mixed_NF = self._projected(hidden, self.self_attention.linear_qkv)
        return hidden, *self._heads(mixed_NF, rotation)

    def _heads(self, mixed_NF: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns q_NHD and kv_N2GD of the projection's rows, with norms and rotation."""
        attention = self.self_attention
        has_norms = not isinstance(attention.q_layernorm, IdentityOp | None)
        if has_norms and not self.options.norm_after_rotation:
            mixed_NF = self._normalize_heads(mixed_NF)
        q_NHD, kv_N2GD = split_and_rotate(mixed_NF, rotation, attention.num_query_groups_per_partition)
        if has_norms and self.options.norm_after_rotation:
            k_NGD, v_NGD = kv_N2GD.unbind(1)
            q_NHD = attention.q_layernorm(q_NHD)
            kv_N2GD = torch.stack((attention.k_layernorm(k_NGD.contiguous()), v_NGD), dim=1)
        return q_NHD, kv_N2GD

    def _normalize_heads(self, mixed_NF: torch.Tensor) -> torch.Tensor:
        """Returns the projection's rows after megatron's norms of query and key heads, of each head or of all
        together."""
        attention = self.self_attention
        shape = (attention.num_query_groups_per_partition, -1, attention.hidden_size_per_attention_head)
        heads = mixed_NF.unflatten(1, shape)
        q, k, v = heads[:, :, :-2], heads[:, :, -2:-1], heads[:, :, -1:]
        return torch.cat((attention.q_layernorm(q), attention.k_layernorm(k), v), dim=2).flatten(1)

    def post(self, o_NHD: torch.Tensor, *residual: torch.Tensor, half: Half | None = None) -> torch.Tensor:
        """Computes the output projection, the residual and the MLP.

        Args:
            o_NHD: core attention's output for all rows and this rank's heads.
            residual: the hidden rows that :meth:`pre` returned first.
            half: counts of the nano-batch's routers, in models with experts.

        Returns:
            [rows, 1, hidden], the layer's output.
        """
        return self.added(*self.behind(*self.mixed(o_NHD, *residual), half))

    def mixed(self, o: torch.Tensor, *residual: torch.Tensor) -> tuple[Branch, torch.Tensor]:
        (hidden,) = residual
        return self.self_attention.linear_proj(o.flatten(1).unsqueeze(1)), hidden

    def behind(self, branch: Branch | None, hidden: torch.Tensor, half: Half | None) -> tuple[Branch, torch.Tensor]:
        """Computes the MLP or the experts behind a mixer, which is this layer's or that of a layer before.

        Args:
            branch: the mixer's output; None where nothing is to be added before the norm.
            hidden: the residual to which it is to be added.
            half: counts of the nano-batch's routers, in models with experts.

        Returns:
            The MLP's output, and the residual for :meth:`added`.
        """
        return self._transformed(*self._before_mlp(branch, hidden), half)

    @property
    def has_exchanges(self) -> bool:
        """Whether rows travel to experts behind the mixer."""
        return isinstance(self.mlp, HalvesLayer)

    def behind_parts(
        self, branch: Branch | None, hidden: torch.Tensor, half: Half | None
    ) -> Generator[None, None, tuple[Branch, torch.Tensor]]:
        """Computes what :meth:`behind` does, as a generator: it pauses while rows are on their way to experts, and
        back."""
        read, residual, normed, norm = self._before_mlp(branch, hidden)
        if not isinstance(self.mlp, HalvesLayer):
            return self._transformed(read, residual, normed, norm, half)
        assert half is not None
        output = yield from self.mlp.parts(normed, half)
        return (output, None), residual

    def _before_mlp(
        self, branch: Branch | None, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
        """Returns the input of the MLP's norm, the residual, the norm's output and the norm."""
        if branch is None:
            hidden, normed = beside(self.pre_mlp_layernorm, hidden)
            return hidden, hidden, normed, self.pre_mlp_layernorm
        if self.options.parallel_mlp:
            added = self._add(branch, hidden, self.self_attn_bda, self.post_attention_layernorm)
            return hidden, added, self.input_layernorm(hidden), self.input_layernorm
        norm = self.pre_mlp_layernorm
        if self._adds_plainly(branch, hidden) and isinstance(norm, RMSNorm):
            added, normed = norm.beside(hidden, branch[0])
        else:
            added = self._add(branch, hidden, self.self_attn_bda, self.post_attention_layernorm)
            added, normed = beside(norm, added)
        return added, added, normed, norm

    def added(self, branch: Branch, residual: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output: the residual plus the output of its last part."""
        return self._add(branch, residual, self.mlp_bda, self.post_mlp_layernorm)

    def _adds_plainly(self, branch: Branch, residual: torch.Tensor) -> bool:
        """Whether attention's output is added to the residual as it is."""
        output, bias = branch
        plain = bias is None and self.post_attention_layernorm is None and self.options.residual_multiplier == 1.0
        return plain and not (self.hidden_dropout and self.training) and output.dtype == residual.dtype

    def _transformed(
        self, hidden: torch.Tensor, residual: torch.Tensor, normed: torch.Tensor, norm: Any, half: Half | None
    ) -> tuple[Branch, torch.Tensor]:
        """Returns megatron's ``_forward_mlp`` of ``normed``, and the residual. ``normed`` is kept for backward only if
        the layer keeps outputs; else the norm of ``hidden`` is computed again."""
        if isinstance(self.mlp, HalvesLayer):
            assert half is not None
            return self.mlp(normed, half), residual
        if self.recompute_mlp:
            # The bias is a parameter, which a checkpointed function must not return.
            has_bias = self.config.add_bias_linear or self.options.mlp_bias
            bias = self.mlp.linear_fc2.bias if has_bias else None
            transformed = tensor_parallel.checkpoint(lambda x: self.mlp(x)[0], False, normed), bias
        else:
            transformed = self.mlp(normed)
        if self.recompute_mlp or keeps_inputs(self.mlp.linear_fc1):
            self._forget_norm(norm, hidden, normed, transformed[0])
        return transformed, residual

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: PackedMicroBatch, rotary_pos_emb: RowRotations, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """Computes the whole layer with core attention at home, as megatron's block calls it.

        Args:
            hidden_states: hidden rows as in :meth:`pre`.
            attention_mask: the micro-batch, which knows how its attention is computed.
            rotary_pos_emb: rotations of all rows.

        Returns:
            The layer's output, and no context of cross attention.
        """
        hidden, q_NHD, kv_N2GD = self.pre(hidden_states, rotary_pos_emb.of(self.layer_number))
        q, k, v = (x[:, None] for x in (q_NHD, *keys_and_values(kv_N2GD, q_NHD.shape[2])))
        o = self.self_attention.core_attention(q, k, v, attention_mask)
        balance = attention_mask.balance
        return self.post(o, hidden, half=None if balance is None else balance.half(0)), None


def beside(norm: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``hidden`` and its norm."""
    return norm.beside(hidden) if isinstance(norm, RMSNorm) else (hidden, norm(hidden))


def keep_outputs_of(model: torch.nn.Module, keep: bool) -> None:
    """Sets whether layers keep the outputs of their norms for backward, and MLPs the output of SwiGLU.

    Recomputed MLPs need their output right away and keep it in any case."""
    for module in model.modules():
        if isinstance(module, SplitLayerParts):
            module.keeps_outputs = keep
        elif isinstance(module, SwigluMLP):
            module.keeps_output = keep or module.config.recompute_granularity is not None
