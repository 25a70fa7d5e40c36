"""Ulysses: the group's documents as one sequence, attention sharded by heads (arXiv 2309.14509).

One all-to-all turns every rank's rows of all heads into all rows of its share of the heads; another turns o back.
Recurrent layers run by fla's context parallelism, on CPUs by DistCA's exchange of summaries.

Shape suffixes: N rows of the rank, T rows of the group, C ranks of the group; H query heads, G key/value heads, h and g
this rank's share of them, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.baselines.fla_parts import FlaParts
from benchmarks.baselines.groups import CpGroup
from distca.attention import Kernel, TaskBatch
from distca.attention.kernel import Timer
from distca.baselines.layouts import HomePieces
from distca.device.host_to_device import Destination
from distca.plan import AttentionKind
from distca.recurrent import Recurrence
from distca.runtime import AttentionPool
from distca.runtime.recurrent_routes import RecurrentRoutes
from megatron_patches.steps.batch_context import PackedMicroBatch


@dataclass(frozen=True)
class UlyssesMicroBatch(PackedMicroBatch):
    """A rank's part of a group's sequence; ``batch`` has the group's whole documents.

    Attributes:
        group: the context-parallel group.
        counts: [C] rows of each of its ranks.
        parts: for recurrent layers on GPUs.
    """

    group: CpGroup
    counts: list[int]
    parts: FlaParts | None = field(default=None, kw_only=True)

    def recur(self, pool: AttentionPool, layer: int, what: Recurrence, *rest: Any) -> torch.Tensor:
        if self.parts is None:
            return super().recur(pool, layer, what, *rest)
        return self.parts.recur(what, *rest)

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
        if not sum(self.counts):
            return q_NHD * 0
        assert sink_H is None, "refused before a model of such layers is built"
        return _Ulysses.apply(q_NHD, k_NGD, v_NGD, self, kernel, kind, timer)

    @staticmethod
    def of(
        pieces: HomePieces,
        lengths: np.ndarray,
        group_of: np.ndarray,
        group: CpGroup,
        device: Destination,
        recurrent: Mapping[int, RecurrentRoutes] | None = None,
    ) -> UlyssesMicroBatch:
        """This rank's micro-batch. ``pieces``: contiguous parts of all groups' sequences; ``recurrent``: routes of
        recurrent layers on CPUs, where there are some."""
        first_rank = group.number * group.size
        rows = np.bincount(pieces.rank, weights=pieces.rows, minlength=first_rank + group.size).astype(np.int64)
        counts = rows[first_rank : first_rank + group.size].tolist()
        own = np.asarray(lengths)[group_of == group.number]
        borders, mine, parts = np.concatenate(([0], np.cumsum(own))), counts[group.rank], None
        batch = TaskBatch.of(borders, borders, device)
        if recurrent and batch.cu_q.is_cuda:
            parts = FlaParts.of(group, mine, own, batch.cu_q.device)
        return UlyssesMicroBatch(batch, mine, group, counts, recurrent=recurrent or {}, parts=parts)

    def to_heads(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """All rows of this rank's share of the heads, from this rank's rows of all heads: T_hD for each N_HD."""
        ranks = self.group.size
        parts = [x.unflatten(1, (ranks, -1)) for x in tensors]
        sent_CNhD = torch.cat(parts, dim=2).transpose(0, 1).contiguous()
        received_ThD = sent_CNhD.new_empty(sum(self.counts), *sent_CNhD.shape[2:])
        dist.all_to_all_single(
            received_ThD, sent_CNhD.flatten(0, 1), self.counts, [self.rows] * ranks, group=self.group.group
        )
        return list(received_ThD.split([part.shape[2] for part in parts], dim=1))

    def to_rows(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The inverse: N_HD for each T_hD."""
        ranks = self.group.size
        sent_ThD = torch.cat(tensors, dim=1).contiguous()
        received_CNhD = sent_ThD.new_empty(ranks, self.rows, *sent_ThD.shape[1:])
        dist.all_to_all_single(
            received_CNhD.view(ranks * self.rows, *sent_ThD.shape[1:]),
            sent_ThD,
            [self.rows] * ranks,
            self.counts,
            group=self.group.group,
        )
        shares = received_CNhD.transpose(0, 1).split([x.shape[1] for x in tensors], dim=2)
        return [share.flatten(1, 2) for share in shares]


class _Ulysses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        micro_batch: UlyssesMicroBatch,
        kernel: Kernel,
        kind: AttentionKind,
        timer: Timer,
    ) -> torch.Tensor:
        q_ThD, k_TgD, v_TgD = micro_batch.to_heads(q, k, v)
        with timer("forward"):
            o_ThD, lse = kernel.forward(q_ThD, k_TgD, v_TgD, micro_batch.batch, kind)
        ctx.save_for_backward(q_ThD, k_TgD, v_TgD, o_ThD, lse)
        ctx.rest = (micro_batch, kernel, kind, timer)
        return micro_batch.to_rows(o_ThD)[0]

    @staticmethod
    def backward(ctx: Any, *do: torch.Tensor) -> Any:
        micro_batch, kernel, kind, timer = ctx.rest
        (do_ThD,) = micro_batch.to_heads(do[0])
        with timer("backward"):
            gradients = kernel.backward(do_ThD.contiguous(), *ctx.saved_tensors, micro_batch.batch, kind)
        return (*micro_batch.to_rows(*gradients), None, None, None, None)
