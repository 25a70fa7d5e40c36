"""The objects that a model gets in place of Megatron's attention mask.

Megatron passes the argument ``attention_mask`` of a model down to its block and its core attention without reading it.
So an object in its place reaches our block and our attention modules, and no signature changes. ``step.py`` makes one
for every micro-batch of a rank.

There are two classes. In a :class:`DisaggregatedMicroBatch` other ranks compute parts of a rank's core attention. Its
rows are split into two nano-batches, ping and pong: transfers of one overlap with compute of the other. In a
:class:`PackedMicroBatch` every document lies whole on one rank, and that rank computes its attention itself.

Axes: N rows of this rank, H query heads, G key and value heads, D elements of a head. In recurrent layers: C channels
of the convolution, V elements of a value.
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

    Attributes:
        routes: for each layer of this pipeline stage, which rows this rank sends and receives, by nano-batch.
        nano_rows: number of this rank's rows in each nano-batch, with padding.
        chunks: number of tensor-parallel ranks over which sequence parallelism splits the rows; 1 without it. Each
            rank's contiguous chunk has a part of every nano-batch; :func:`gather_nano_rows` has an example.
        document_lengths: [N] int64 tokens of each row's document; None where the model's positions do not need them.
        documents: [N] int64 number of each row's document in the micro-batch; -1 in padding.
        document_count: number of documents in the micro-batch, over all ranks.
        balance: counts of rows by expert; None in models without experts.
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

    Benchmarks' baselines subclass it: their :meth:`attend` computes core attention in another way.

    Attributes:
        batch: the borders between this rank's documents, for the attention kernel.
        rows: number of rows that belong to documents; all rows behind them are padding.
        recurrent: where documents begin and end, for recurrent layers. The key is the number of earlier rows that a
            layer's convolution reads.
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
        """One number, that of all rows: there are no nano-batches. Empty where ``documents`` is not set."""
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
        """Returns o_NHD, core attention of this rank's rows; q, k, v and sinks get gradients from it.

        Args:
            kernel: the attention kernel.
            q_NHD: queries, without padding rows.
            k_NGD: keys of the same rows.
            v_NGD: values of the same rows.
            kind: the layer's window, softmax scale and limit of scores.
            timer: returns the context in which the kernel's "forward" or "backward" is timed.
            sink_H: a learned score of each head that joins its softmax; None in a layer without sinks.
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
        """Returns o_NHV, the output of a recurrent layer's core for this rank's rows; it is zero in padding.

        Args:
            pool: this rank's transport and timeline.
            layer: the layer's number on this stage, for the timeline.
            what: the recurrence: its heads, dimensions and rule.
            parameters: the core's own weights, such as those of its convolution.
            mixed_NC: rows before the convolution.
            g: [N, H] or [N, H, channels of k] logarithm of the factor by which the state decays at each row.
            beta_NH: the factor of each row's update of the state.

        Raises:
            SupportError: a baseline's micro-batch was made without ``recurrent``.
        """
        if what.halo_rows not in self.recurrent:
            raise SupportError(
                f"A {type(self).__name__} has no routes of recurrent layers, so this mode of the benchmark cannot "
                "train them: take the mode packed, cp2-keep or distca."
            )
        routes, kernel = self.recurrent[what.halo_rows], choose_recurrent_kernel(what, mixed_NC.device, mixed_NC.dtype)
        return recurrent_core(pool, routes, what, kernel, layer, parameters, mixed_NC, g, beta_NH)


def gather_nano_rows(x: torch.Tensor, nano_rows: Sequence[int], chunks: int) -> list[torch.Tensor]:
    """Splits rows of a micro-batch into its nano-batches, and puts the chunks of each one behind another.

    Example: ping has rows a, b and pong has rows c, d, e, f; 2 tensor-parallel ranks share them. ``x`` is then
    a, c, d | b, e, f, where the bar separates the ranks' chunks. The result is [a, b] and [c, d, e, f].

    Layers' rotations use it: every tensor-parallel rank has the angles of all rows, and needs them by nano-batch.

    Args:
        x: [sum(nano_rows), ...] all rows, chunk after chunk.
        nano_rows: number of rows in each nano-batch, multiples of ``chunks``.
        chunks: as in :class:`DisaggregatedMicroBatch`.

    Returns:
        A [rows, ...] tensor for each nano-batch.
    """
    sizes = [rows // chunks for rows in nano_rows] * chunks
    pieces = x.split(sizes)
    return [torch.cat(pieces[nano :: len(nano_rows)]) for nano in range(len(nano_rows))]
