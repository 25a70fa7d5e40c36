"""The facts on a micro-batch that a model's forward needs beside its tokens. They travel as the attention mask.

megatron-core passes ``attention_mask`` to the block and to every layer's core attention without reading it. So an
object in its place reaches them, and no signature changes.
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
    """A micro-batch whose core attention is computed on other ranks too, in two nano-batches, ping and pong.

    Attributes:
        routes: this rank's routes, by layer of its stage.
        nano_rows: padded home rows of each nano-batch.
        chunks: tensor-parallel ranks that share the sequence. Rows are ordered so that the contiguous chunk of each
            rank holds its part of every nano-batch; :func:`gather_nano_rows` has an example.
        document_lengths: [rows] int64 tokens of each row's document, where the model's positions need them.
        documents: [rows] int64 document of each row in the micro-batch; -1 in padding.
        document_count: number of the micro-batch's documents, over all ranks.
        balance: how many rows the routers gave to each expert, in models with experts.
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
    """A micro-batch of whole documents whose core attention stays at home.

    A subclass with its own :meth:`attend` computes core attention in another way, as benchmarks' baselines do.

    Attributes:
        batch: borders of this rank's tasks.
        rows: number of rows that belong to documents; rows beyond them are padding.
        recurrent: routes of recurrent layers, which move nothing, by the number of rows that their convolution reads
            before a row.
        document_lengths, documents, document_count, balance: as in :class:`DisaggregatedMicroBatch`.
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
        """The number of all rows, which are computed together."""
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
        """o_NHD of this rank's rows, differentiable with respect to q, k, v and the sinks.

        Args:
            kernel: the kernel that computes a batch of tasks.
            q_NHD: [rows, heads, head_dim].
            k_NGD: [rows, kv_heads, head_dim].
            v_NGD: [rows, kv_heads, head_dim].
            kind: the layer's kind.
            timer: gives contexts in which the kernel runs, "forward" and "backward".
            sink_H: [heads] sinks of a layer that has some.
        """
        if not self.rows:
            return q_NHD * 0
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
        """o_NHV of a recurrent core of this rank's rows, zero in padding.

        Args:
            pool: the model's server pool.
            layer: number of the layer's unit, for the timeline.
            what: the recurrence.
            parameters: the core's weights.
            mixed_NC: rows before the convolution.
            g: [rows, heads] or [rows, heads, channels of k] logarithms of the state's decay.
            beta_NH: [rows, heads] factors of what each row adds to the state.

        Raises:
            SupportError: this kind of micro-batch has no routes of recurrent layers.
        """
        if what.halo_rows not in self.recurrent:
            raise SupportError(
                f"A {type(self).__name__} has no routes of recurrent layers, so this mode of the benchmark cannot "
                "train them: take packed, cp2-keep or distca."
            )
        routes, kernel = self.recurrent[what.halo_rows], choose_recurrent_kernel(what, mixed_NC.device, mixed_NC.dtype)
        return recurrent_core(pool, routes, what, kernel, layer, parameters, mixed_NC, g, beta_NH)


def gather_nano_rows(x: torch.Tensor, nano_rows: Sequence[int], chunks: int) -> list[torch.Tensor]:
    """Returns the rows of each nano-batch, of which every chunk has a part.

    Example: with 2 chunks and nano-batches of 2 and 4 rows, rows are in the order 0, 2, 3, 1, 4, 5: chunk 0 has row 0
    of ping and rows 2 and 3 of pong.

    Args:
        x: [sum(nano_rows), ...] rows in micro-batch order.
        nano_rows: rows of each nano-batch, multiples of ``chunks``.
        chunks: tensor-parallel ranks that share the sequence.

    Returns:
        One [rows, ...] tensor per nano-batch.
    """
    sizes = [rows // chunks for rows in nano_rows] * chunks
    pieces = x.split(sizes)
    return [torch.cat(pieces[nano :: len(nano_rows)]) for nano in range(len(nano_rows))]
