"""Megatron's transformer layer in two parts, before and after core attention, which other ranks may compute.

The *mixer* of a layer is its attention, or a recurrence such as Mamba's. The *core* of a mixer is the part without
projections: softmax attention over the documents, or the recurrence. ``pre`` computes everything before the core, and
``post`` everything behind it. The runner of layers (``distca/runtime/ping_pong.py``) calls both through
``layers/units.py`` and lets rows travel in between. It computes a micro-batch as two nano-batches, so that rows of one
travel while the other computes.

Shape suffixes: N rows (tokens), H query heads, G key/value heads, D head_dim, F columns of the QKV projection. The 2 of
kv_N2GD is keys, then values. Heads are those of this tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer

from distca.ops.recomputed import forget_until_backward
from distca.ops.rotary import Rotation, split_and_rotate
from distca.runtime.server import keys_and_values
from megatron_patches.experts.balance import NanoBatch
from megatron_patches.experts.layer import NanoBatchExperts
from megatron_patches.layers.rotations import RowRotations
from megatron_patches.model.model_options import MEGATRONS, ModelOptions
from megatron_patches.patches.fused_ops import SwigluMLP
from megatron_patches.patches.norms import RMSNorm, norm_class
from megatron_patches.steps.batch_context import PackedMicroBatch
from megatron_patches.te.quantization import keeps_inputs

Branch = tuple[torch.Tensor, torch.Tensor | None]
"""The output of a mixer or an MLP before it is added to the residual, and its bias where it has one."""


class SplitLayerParts:
    """The steps around a mixer that layers with attention, delta nets and Mamba share.

    Attributes:
        options: the model's options.
        keeps_outputs: whether outputs of norms are kept for backward, not computed again.
    """

    options = MEGATRONS
    keeps_outputs = False
    config: TransformerConfig
    training: bool
    hidden_dropout: float
    input_layernorm: Any

    def mixed(self, o: torch.Tensor, *residual: torch.Tensor) -> tuple[Branch, torch.Tensor]:
        """Returns the mixer's output, and the residual to which it is to be added.

        Args:
            o: the core's output for all rows and this rank's heads.
            residual: the first tensors that the layer's ``pre`` returned, all but the core's inputs.
        """
        raise NotImplementedError

    def _projected(self, hidden: torch.Tensor, linear: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``hidden`` for the residual, and [rows, columns] the projection that makes the core's inputs.

        With sequence parallelism the projection's rows are those of all tensor-parallel ranks.
        """
        hidden, normed = beside(self.input_layernorm, hidden)
        mixed, _ = linear(normed)
        if keeps_inputs(linear):
            self._forget_norm(self.input_layernorm, hidden, normed, mixed)
        return hidden, mixed.squeeze(1)

    def _forget_norm(self, norm: Any, hidden: torch.Tensor, normed: torch.Tensor, used: torch.Tensor) -> None:
        """Frees the norm's output after its use. Backward computes it again once it has the gradient of ``used``.

        Args:
            norm: the norm.
            hidden: its input.
            normed: its output; without a norm it is ``hidden`` itself.
            used: the output of the only operation that reads ``normed``.
        """
        if normed is not hidden and not self.keeps_outputs:
            forget_until_backward(normed, partial(norm.fill, hidden.detach()), used)

    def _add(self, branch: Branch, residual: torch.Tensor, combine: Any, norm: Any) -> torch.Tensor:
        """Returns the residual plus a branch, after the branch's bias, norm and multiplier.

        Args:
            branch: the output of a mixer or an MLP.
            residual: the rows to which it is added.
            combine: Megatron's maker of the function that adds bias, dropout and residual.
            norm: the norm of the branch; None for none.
        """
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
    """Megatron's layer with attention and an MLP, in two parts and with the additions of :class:`ModelOptions`.

    :meth:`forward` is for attention that stays on this rank: there it is ``post(core_attention(pre(x)), x)``. Unless
    the layer ``keeps_outputs``, outputs of norms are computed again in backward.
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
            hidden: [rows, 1, hidden], with sequence parallelism this rank's part of the rows.
            rotation: RoPE's rotations of all rows.

        Returns:
            ``hidden`` for :meth:`post`, then q_NHD and kv_N2GD of all rows. As ``hidden`` comes out of the same
            operation as the norm, gradients of the norm and of the residual are added in one pass.
        """
        hidden, mixed_NF = self._projected(hidden, self.self_attention.linear_qkv)
        return hidden, *self._heads(mixed_NF, rotation)

    def _heads(self, mixed_NF: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns q_NHD and kv_N2GD from the QKV projection's output, after the heads' norms and RoPE."""
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
        """Returns the QKV projection's output after the norms of queries and keys, over each head or over all heads."""
        attention = self.self_attention
        shape = (attention.num_query_groups_per_partition, -1, attention.hidden_size_per_attention_head)
        heads = mixed_NF.unflatten(1, shape)
        q, k, v = heads[:, :, :-2], heads[:, :, -2:-1], heads[:, :, -1:]
        return torch.cat((attention.q_layernorm(q), attention.k_layernorm(k), v), dim=2).flatten(1)

    def post(self, o_NHD: torch.Tensor, *residual: torch.Tensor, nano_batch: NanoBatch | None = None) -> torch.Tensor:
        """Computes everything behind core attention: output projection, residual, norm and MLP or experts.

        Args:
            o_NHD: core attention's output for all rows.
            residual: the hidden rows that :meth:`pre` returned first.
            nano_batch: the nano-batch with the counts of its routers, in models with experts.

        Returns:
            [rows, 1, hidden], the layer's output.
        """
        return self.added(*self.behind(*self.mixed(o_NHD, *residual), nano_batch))

    def mixed(self, o: torch.Tensor, *residual: torch.Tensor) -> tuple[Branch, torch.Tensor]:
        (hidden,) = residual
        return self.self_attention.linear_proj(o.flatten(1).unsqueeze(1)), hidden

    def behind(
        self, branch: Branch | None, hidden: torch.Tensor, nano_batch: NanoBatch | None
    ) -> tuple[Branch, torch.Tensor]:
        """Adds a branch to the residual, then computes this layer's norm and MLP or experts.

        In a HybridModel a layer is a mixer or an MLP. Then the branch comes from the layer before.

        Args:
            branch: the output of a mixer or an MLP; None where the residual is complete.
            hidden: the residual to which it is to be added.
            nano_batch: the nano-batch with the counts of its routers, in models with experts.

        Returns:
            The MLP's output, and the residual for :meth:`added`.
        """
        return self._transformed(*self._before_mlp(branch, hidden), nano_batch)

    @property
    def has_exchanges(self) -> bool:
        """Whether :meth:`behind` sends rows to experts."""
        return isinstance(self.mlp, NanoBatchExperts)

    def behind_parts(
        self, branch: Branch | None, hidden: torch.Tensor, nano_batch: NanoBatch | None
    ) -> Generator[None, None, tuple[Branch, torch.Tensor]]:
        """Computes what :meth:`behind` does, as a generator, which yields while rows travel to experts, and again while
        outputs travel back."""
        read, residual, normed, norm = self._before_mlp(branch, hidden)
        if not isinstance(self.mlp, NanoBatchExperts):
            return self._transformed(read, residual, normed, norm, nano_batch)
        assert nano_batch is not None
        output = yield from self.mlp.parts(normed, nano_batch)
        return (output, None), residual

    def _before_mlp(
        self, branch: Branch | None, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
        """Adds a branch to the residual and computes the norm of the MLP's input.

        Returns:
            The norm's input, the residual, the norm's output, and the norm itself.
        """
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
        """Returns the layer's output: the residual plus the branch of its MLP or experts."""
        return self._add(branch, residual, self.mlp_bda, self.post_mlp_layernorm)

    def _adds_plainly(self, branch: Branch, residual: torch.Tensor) -> bool:
        """Whether a mixer's output is added to the residual without bias, norm, multiplier, dropout or cast."""
        output, bias = branch
        plain = bias is None and self.post_attention_layernorm is None and self.options.residual_multiplier == 1.0
        return plain and not (self.hidden_dropout and self.training) and output.dtype == residual.dtype

    def _transformed(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        normed: torch.Tensor,
        norm: Any,
        nano_batch: NanoBatch | None,
    ) -> tuple[Branch, torch.Tensor]:
        """Computes the MLP or the experts.

        Args:
            hidden: the input of the norm, from which backward computes ``normed`` again.
            residual: the rows to which the MLP's output will be added; returned as they are.
            normed: the norm's output.
            norm: the norm.
            nano_batch: the nano-batch with the counts of its routers, in models with experts.

        Returns:
            The MLP's output with its bias, and the residual.
        """
        if isinstance(self.mlp, NanoBatchExperts):
            assert nano_batch is not None
            return self.mlp(normed, nano_batch), residual
        if self.recompute_mlp:
            # MLPs return their bias, a parameter, to be added later. A function that is computed again may not.
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
        """Computes the whole layer, with core attention on this rank. Megatron's own block calls it.

        Args:
            hidden_states: hidden rows as in :meth:`pre`.
            attention_mask: the micro-batch, whose ``attend`` computes core attention of its documents.
            rotary_pos_emb: RoPE's rotations of all rows, by layer.

        Returns:
            The layer's output, and None, as there is no cross attention.
        """
        hidden, q_NHD, kv_N2GD = self.pre(hidden_states, rotary_pos_emb.of(self.layer_number))
        q, k, v = (x[:, None] for x in (q_NHD, *keys_and_values(kv_N2GD, q_NHD.shape[2])))
        o = self.self_attention.core_attention(q, k, v, attention_mask)
        balance = attention_mask.balance
        return self.post(o, hidden, nano_batch=None if balance is None else balance.nano_batch(0)), None


def beside(norm: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``hidden`` and its norm. The gradients of both results are added in one pass where the norm can."""
    return norm.beside(hidden) if isinstance(norm, RMSNorm) else (hidden, norm(hidden))


def keep_outputs_of(model: torch.nn.Module, keep: bool) -> None:
    """Sets whether layers keep the outputs of their norms for backward, and MLPs the output of their activation.

    MLPs that backward computes again as a whole keep it in any case, as backward needs it right after that.
    """
    for module in model.modules():
        if isinstance(module, SplitLayerParts):
            module.keeps_outputs = keep
        elif isinstance(module, SwigluMLP):
            module.keeps_output = keep or module.config.recompute_granularity is not None
