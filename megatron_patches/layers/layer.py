"""Megatron's transformer layer, cut into the part before the core and the part behind it.

The *mixer* of a layer is its attention, or a recurrence such as Mamba's. The *core* is the operation inside the mixer
for which rows travel between ranks: softmax(QKᵀ)V, or the recurrence without projections. ``pre`` computes everything
before the core, and ``post`` everything behind it.

The rows of a micro-batch may be split into two *nano-batches*. One nano-batch is computed while rows of the other
travel between ranks.

Shape suffixes: N rows (tokens), H query heads, G key/value heads, D head_dim, F columns of the QKV projection; 2 stands
for keys and values. Heads are those of this tensor-parallel rank.
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
from megatron_patches.layers.full_recompute import differentiable
from megatron_patches.layers.rotations import RowRotations
from megatron_patches.model.added_to_forward import added_to_forward
from megatron_patches.model.model_options import MEGATRONS, ModelOptions
from megatron_patches.patches.fused_ops import SwigluMLP
from megatron_patches.patches.norms import RMSNorm, head_norms, norm_class
from megatron_patches.steps.batch_context import PackedMicroBatch
from megatron_patches.te.quantization import keeps_inputs

Branch = tuple[torch.Tensor, torch.Tensor | None]
"""The output of a mixer or an MLP, and the bias that is still to be added, or None. The residual is not added yet."""


class SplitLayerParts:
    """Methods of all layers that are cut in this way, with attention or with a recurrence.

    Attributes:
        keeps_outputs: whether outputs of norms stay in memory until backward. If False, backward computes those again
            that only one linear layer or MLP reads. A linear layer in FP8 keeps an FP8 copy of its input. So the norm's
            output is freed, and not computed again.
    """

    options = MEGATRONS
    keeps_outputs = False
    config: TransformerConfig
    training: bool
    hidden_dropout: float
    input_layernorm: Any

    def mixed(self, o: torch.Tensor, *residual: torch.Tensor) -> tuple[Branch, torch.Tensor]:
        """Returns the mixer's output, and the residual to which this output is added.

        Args:
            o: the core's output for all rows.
            residual: the tensors that ``pre`` returned ahead of the core's inputs.
        """
        raise NotImplementedError

    def _projected(self, hidden: torch.Tensor, linear: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``hidden``, and the output of ``linear`` for the normed rows, [rows, columns].

        With sequence parallelism the output has the rows of all tensor-parallel ranks.
        """
        hidden, normed = beside(self.input_layernorm, hidden)
        mixed, _ = linear(normed)
        if keeps_inputs(linear):
            self._forget_norm(self.input_layernorm, hidden, normed, mixed)
        return hidden, mixed.squeeze(1)

    def _forget_norm(self, norm: Any, hidden: torch.Tensor, normed: torch.Tensor, used: torch.Tensor) -> None:
        """Frees ``normed``, and backward computes it again from ``hidden``.

        Nothing is freed if outputs are kept, or if the norm has a user's hooks, which may read or change ``normed``.
        ``used`` is the output of the only operation that reads ``normed``.
        """
        if normed is not hidden and not self.keeps_outputs and not added_to_forward(norm):
            forget_until_backward(normed, partial(norm.fill, hidden.detach()), used)

    def _add(self, branch: Branch, residual: torch.Tensor, combine: Any, norm: Any) -> torch.Tensor:
        """Applies bias, norm, multiplier and dropout to the branch, and returns the residual plus the result."""
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
    """Megatron's layer with attention and an MLP, cut in two. :class:`ModelOptions` add norms and multipliers."""

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
        """Computes the input norm, the QKV projection, the model's norms of queries and keys if any, and RoPE.

        Args:
            hidden: [rows, 1, hidden], with sequence parallelism this rank's part of the rows.
            rotation: RoPE's rotations of all rows.

        Returns:
            ``hidden`` as given, then q_NHD and kv_N2GD of all tensor-parallel ranks' rows.
        """
        hidden, mixed_NF = self._projected(hidden, self.self_attention.linear_qkv)
        return hidden, *self._heads(mixed_NF, rotation)

    def _heads(self, mixed_NF: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        attention = self.self_attention
        has_norms, norms = not isinstance(attention.q_layernorm, IdentityOp | None), None
        if has_norms and not self.options.norm_after_rotation:
            norms = head_norms(attention.q_layernorm, attention.k_layernorm)
            if norms is None:
                mixed_NF = self._normalize_heads(mixed_NF)
        q_NHD, kv_N2GD = split_and_rotate(mixed_NF, rotation, attention.num_query_groups_per_partition, norms)
        if has_norms and self.options.norm_after_rotation:
            k_NGD, v_NGD = kv_N2GD.unbind(1)
            q_NHD = attention.q_layernorm(q_NHD)
            kv_N2GD = torch.stack((attention.k_layernorm(k_NGD.contiguous()), v_NGD), dim=1)
        return q_NHD, kv_N2GD

    def _normalize_heads(self, mixed_NF: torch.Tensor) -> torch.Tensor:
        attention = self.self_attention
        shape = (attention.num_query_groups_per_partition, -1, attention.hidden_size_per_attention_head)
        heads = mixed_NF.unflatten(1, shape)  # for each key/value head: its query heads, the key, the value
        q, k, v = heads[:, :, :-2], heads[:, :, -2:-1], heads[:, :, -1:]
        return torch.cat((attention.q_layernorm(q), attention.k_layernorm(k), v), dim=2).flatten(1)

    def post(self, o_NHD: torch.Tensor, *residual: torch.Tensor, nano_batch: NanoBatch | None = None) -> torch.Tensor:
        """Computes output projection, residual, norm, and MLP or experts; returns [rows, 1, hidden].

        Args:
            o_NHD: core attention's output for all rows.
            residual: the hidden rows that :meth:`pre` returned first.
            nano_batch: counts the rows of each expert; None in models without experts.
        """
        return self.added(*self.behind(*self.mixed(o_NHD, *residual), nano_batch))

    def mixed(self, o: torch.Tensor, *residual: torch.Tensor) -> tuple[Branch, torch.Tensor]:
        (hidden,) = residual
        return self.self_attention.linear_proj(o.flatten(1).unsqueeze(1)), hidden

    def behind(
        self, branch: Branch | None, hidden: torch.Tensor, nano_batch: NanoBatch | None
    ) -> tuple[Branch, torch.Tensor]:
        """Adds a branch to the residual, and computes the norm, and the MLP or experts.

        The norm reads the sum, or with ``parallel_mlp`` the residual without the branch.

        Args:
            branch: the output of the mixer, or of the MLP of the layer before. None if ``hidden`` already has it.
            hidden: [rows, 1, hidden] the residual.

        Returns:
            The output of the MLP or experts, and the residual for :meth:`added`.
        """
        return self._transformed(*self._before_mlp(branch, hidden), nano_batch)

    @property
    def has_exchanges(self) -> bool:
        return isinstance(self.mlp, NanoBatchExperts)

    def behind_parts(
        self, branch: Branch | None, hidden: torch.Tensor, nano_batch: NanoBatch | None
    ) -> Generator[None, None, tuple[Branch, torch.Tensor]]:
        """:meth:`behind` as a generator. With experts it yields twice: while rows travel to experts, and while the
        experts' outputs travel back."""
        read, residual, normed, norm = self._before_mlp(branch, hidden)
        if not isinstance(self.mlp, NanoBatchExperts):
            return self._transformed(read, residual, normed, norm, nano_batch)
        assert nano_batch is not None
        output = yield from self.mlp.parts(normed, nano_batch)
        return (output, None), residual

    def _before_mlp(
        self, branch: Branch | None, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
        """Returns the input of the MLP's norm, the residual plus the branch, the norm's output, and the norm."""
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
        return self._add(branch, residual, self.mlp_bda, self.post_mlp_layernorm)

    def _adds_plainly(self, branch: Branch, residual: torch.Tensor) -> bool:
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
        if isinstance(self.mlp, NanoBatchExperts):
            assert nano_batch is not None
            return self.mlp(normed, nano_batch), residual
        if self.recompute_mlp:
            # A checkpointed function may not return a parameter, so the bias is taken from the module.
            has_bias = self.config.add_bias_linear or self.options.mlp_bias
            bias = self.mlp.linear_fc2.bias if has_bias else None
            trained = any(weight.requires_grad for weight in self.mlp.parameters())
            given = differentiable(normed) if trained else normed
            transformed = tensor_parallel.checkpoint(lambda x: self.mlp(x)[0], False, given), bias
        else:
            transformed = self.mlp(normed)
        if self.recompute_mlp or keeps_inputs(self.mlp.linear_fc1):
            self._forget_norm(norm, hidden, normed, transformed[0])
        return transformed, residual

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: PackedMicroBatch, rotary_pos_emb: RowRotations, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """Computes the whole layer on this rank, core attention included; Megatron's own block calls this method.

        Args:
            hidden_states: [rows, 1, hidden], with sequence parallelism this rank's part of the rows.
            attention_mask: the micro-batch in place of a mask.
            rotary_pos_emb: RoPE's rotations of all rows in each layer.

        Returns:
            The layer's output, and None in place of Megatron's ``context``.
        """
        hidden, q_NHD, kv_N2GD = self.pre(hidden_states, rotary_pos_emb.of(self.layer_number))
        q, k, v = (x[:, None] for x in (q_NHD, *keys_and_values(kv_N2GD, q_NHD.shape[2])))
        o = self.self_attention.core_attention(q, k, v, attention_mask)
        balance = attention_mask.balance
        return self.post(o, hidden, nano_batch=None if balance is None else balance.nano_batch(0)), None


def beside(norm: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``hidden`` and the normed ``hidden``. On GPUs RMSNorm has a kernel for their joint gradient."""
    return norm.beside(hidden) if isinstance(norm, RMSNorm) else (hidden, norm(hidden))


def keep_outputs_of(model: torch.nn.Module, keep: bool) -> None:
    """Sets whether outputs of norms and of MLPs' activations stay in memory until backward.

    If Megatron's ``recompute_granularity`` is set, MLPs do not free outputs of activations even if ``keep`` is False.
    Those of recomputed MLPs do not last until backward anyway.
    """
    for module in model.modules():
        if isinstance(module, SplitLayerParts):
            module.keeps_outputs = keep
        elif isinstance(module, SwigluMLP):
            module.keeps_output = keep or module.config.recompute_granularity is not None
