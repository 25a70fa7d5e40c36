"""The objects that a model gets in place of Megatron's attention mask, one for each micro-batch.

Megatron hands a model's argument ``attention_mask`` to the attention modules without reading it.

A row is the hidden state of one token. "This rank" is a data-parallel rank: all tensor-parallel ranks with the same
tokens. Axes of attention: N rows of this rank, with padding unless said otherwise; H query heads, G key and value
heads, D elements of a head of q and k. Axes of recurrent layers: C channels of the convolution, H heads, V elements of
a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from distca.attention import Kernel, TaskBatch
from distca.attention.kernel import Timer, core_attention
from distca.errors import SupportError
from distca.plan import AttentionKind
from distca.recurrent import CoreParameters, Recurrence, choose_recurrent_kernel
from distca.runtime import AttentionPool, LayerRoutes
from distca.runtime.recurrent_call import recurrent_core
from distca.runtime.recurrent_routes import RecurrentRoutes
from megatron_patches.experts.balance import MicroBatchBalance


@dataclass(frozen=True)
class DisaggregatedMicroBatch:
    """A micro-batch whose core attention is computed on several ranks.

    Rows are split into one or two nano-batches. With two, the device computes one while rows of the other travel.

    Attributes:
        routes: for each layer of this pipeline stage with attention or a recurrence, which rows this rank sends and
            receives.
        nano_rows: number of this rank's rows in each nano-batch, with padding.
        chunks: number of tensor-parallel ranks over which sequence parallelism splits the rows; 1 without it.
        document_lengths: [N] int64 length of each row's document; None if the model's position embedding does not need
            lengths.
        documents: [N] int64 number of each row's document in the micro-batch; -1 in padding.
        document_count: number of documents in the micro-batch, over all ranks.
        balance: counts the rows that go to each expert; the forward of a model with experts sets it.
    """

    routes: Sequence[LayerRoutes]
    nano_rows: Sequence[int]
    chunks: int
    document_lengths: torch.Tensor | None = field(default=None, kw_only=True)
    documents: torch.Tensor | None = field(default=None, kw_only=True)
    document_count: int = field(default=0, kw_only=True)
    balance: MicroBatchBalance | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class PackedMicroBatch:
    """A micro-batch of whole documents, whose core attention and recurrences this rank computes itself.

    Some benchmarks define subclasses that split documents over ranks. For attributes that are not listed see
    :class:`DisaggregatedMicroBatch`.

    Attributes:
        batch: the borders between this rank's documents, for the attention kernel.
        rows: number of rows that belong to documents; padding comes after them.
        recurrent: where documents begin and end, for recurrent layers. The key is ``Recurrence.halo_rows``: how many
            earlier rows a layer's causal convolution reads for one row.
    """

    batch: TaskBatch
    rows: int
    recurrent: Mapping[int, RecurrentRoutes] = field(default_factory=dict, kw_only=True)
    document_lengths: torch.Tensor | None = field(default=None, kw_only=True)
    documents: torch.Tensor | None = field(default=None, kw_only=True)
    document_count: int = field(default=0, kw_only=True)
    balance: MicroBatchBalance | None = field(default=None, kw_only=True)

    @property
    def nano_rows(self) -> Sequence[int]:
        """A list with the number of all rows, including padding; empty if ``documents`` is None."""
        return [] if self.documents is None else [len(self.documents)]

    def attend(
        self,
        kernel: Kernel,
        q_NHD: torch.Tensor,
        k_NGD: torch.Tensor,
        v_NGD: torch.Tensor,
        kind: AttentionKind,
        timer: Timer,
        sink_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns [rows of q, H, elements of a head of v], the core attention of this rank's rows.

        Args:
            q_NHD: queries, without padding rows.
            k_NGD: keys of the same rows.
            v_NGD: values of the same rows; in latent attention their last axis may be shorter than D.
            kind: the layer's window, softmax scale and softcap.
            sink_H: for each head a learned logit that joins the softmax as one more score, or None.
        """
        if not self.rows:
            # The empty result must depend on all inputs: Megatron waits for a gradient of every weight.
            others = [k_NGD, v_NGD] if sink_H is None else [k_NGD, v_NGD, sink_H]
            return (q_NHD[..., : v_NGD.shape[2]] + sum(x.sum() for x in others)) * 0
        return core_attention(q_NHD, k_NGD, v_NGD, self.batch, kernel, kind, timer, sink_H)

    def recur(
        self,
        pool: AttentionPool,
        layer: int,
        what: Recurrence,
        parameters: CoreParameters,
        mixed_NC: torch.Tensor,
        g: torch.Tensor,
        beta_NH: torch.Tensor,
    ) -> torch.Tensor:
        """Returns o_NHV, the output of a recurrent layer's convolution and recurrence. Padding gets 0.

        Args:
            layer: the layer's number in the whole model, from 0; for the timeline.
            parameters: the weights of the convolution and of the recurrence.
            mixed_NC: the input of the convolution.
            g: [N, H] logarithm of the factor by which the recurrent state decays at each row.
            beta_NH: the factor by which each row's update of the recurrent state is multiplied.

        Raises:
            SupportError: ``recurrent`` has no entry for this layer, as in some benchmarks.
        """
        if what.halo_rows not in self.recurrent:
            raise SupportError(
                f"A {type(self).__name__} has no routes of recurrent layers, so this mode of the benchmark cannot "
                "train such layers: take another mode, for example packed or distca."
            )
        routes, kernel = self.recurrent[what.halo_rows], choose_recurrent_kernel(what, mixed_NC.device, mixed_NC.dtype)
        return recurrent_core(pool, routes, what, kernel, layer, parameters, mixed_NC, g, beta_NH)


def gather_nano_rows(x: torch.Tensor, nano_rows: Sequence[int], chunks: int) -> list[torch.Tensor]:
    """Returns the rows of each nano-batch. ``x`` has the rows of all tensor-parallel ranks, for example RoPE's angles.

    Example: nano-batch 0 has rows a, b and nano-batch 1 has rows c, d, e, f. Sequence parallelism gives a, c, d to one
    tensor-parallel rank and b, e, f to the other. For ``x`` = [a, c, d, b, e, f] the result is [a, b] and [c, d, e, f].

    Args:
        x: [sum(nano_rows), ...] the rows of all tensor-parallel ranks, one rank after the other.
        nano_rows: number of rows in each nano-batch, multiples of ``chunks``.
        chunks: as in :class:`DisaggregatedMicroBatch`.
    """
    if len(nano_rows) == 1:
        return [x]
    sizes = [rows // chunks for rows in nano_rows] * chunks
    pieces = x.split(sizes)
    return [torch.cat(pieces[nano :: len(nano_rows)]) for nano in range(len(nano_rows))]
