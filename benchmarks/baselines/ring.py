"""Ring attention over zigzag chunks (arXiv 2310.01889; zigzag: the order that balances a causal mask).

The group's documents are one sequence. Every rank keeps its queries; keys and values travel in a ring, one hop a step,
while the block that is there is computed. Own rows are one causal batch. Of a rank that comes before in the ring all
queries see the early chunk; of one that comes after the late queries see both chunks. So a step has one full (not
causal) task for every document that both ranks hold. Partial outputs are merged in float32 by their log-sum-exp. In
backward gradients of keys and values travel with their blocks, in float32, and arrive home after a whole turn.

Shape suffixes: N rows of the rank, S rows of a block on its way, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.baselines.groups import CpGroup
from benchmarks.baselines.rows import Picked
from distca.attention import Kernel, TaskBatch
from distca.attention.kernel import Timer
from distca.baselines.layouts import HomePieces
from distca.device.host_to_device import Destination
from distca.plan import AttentionKind
from megatron_patches.steps.batch_context import PackedMicroBatch


@dataclass(frozen=True)
class RingStep:
    """The task of a rank with another rank's block: its own query rows, rows of the block, their borders."""

    q: Picked
    kv: Picked
    batch: TaskBatch


@dataclass(frozen=True)
class RingMicroBatch(PackedMicroBatch):
    """A rank's two chunks of a group's sequence; ``batch`` has its own rows.

    Attributes:
        group: the context-parallel group.
        counts: rows of each of its ranks.
        steps: by step 1, 2, ... what is computed with the block of rank (own rank − step); None for nothing.
    """

    group: CpGroup
    counts: list[int]
    steps: list[RingStep | None]

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
        assert sink_H is None and not kind.window, "refused before a model of such layers is built"
        return _Ring.apply(q_NHD, k_NGD, v_NGD, self, kernel, kind, timer)

    @staticmethod
    def of(pieces: HomePieces, group: CpGroup, device: Destination) -> RingMicroBatch:
        """This rank's micro-batch. ``pieces``: zigzag chunks of all groups' sequences."""
        held = [_Held.of(pieces, group.number * group.size + rank) for rank in range(group.size)]
        mine = held[group.rank]
        own = np.concatenate(([0], np.cumsum(mine.rows)))
        steps = []
        for step in range(1, group.size):
            source = (group.rank - step) % group.size
            q, kv = (mine, held[source].early()) if source < group.rank else (mine.late(), held[source])
            steps.append(_step(q, kv, device))
        return RingMicroBatch(
            TaskBatch.of(own, own, device), int(own[-1]), group, [int(each.rows.sum()) for each in held], steps
        )

    def pass_on(self, block: torch.Tensor, step: int) -> tuple[torch.Tensor, list[dist.Work]]:
        """Start to send the block of step ``step`` to the next rank and to receive the one of the next step."""
        ranks = dist.get_process_group_ranks(self.group.group)
        rank, size = self.group.rank, self.group.size
        incoming = block.new_empty(self.counts[(rank - step - 1) % size], *block.shape[1:])
        transfers = [
            dist.P2POp(dist.isend, block, ranks[(rank + 1) % size], self.group.group),
            dist.P2POp(dist.irecv, incoming, ranks[(rank - 1) % size], self.group.group),
        ]
        # Gloo wants its receivers to be there first; a rank of few rows may have nothing to say.
        wanted = [transfer for transfer in transfers if transfer.tensor.numel()]
        return incoming, dist.batch_isend_irecv(wanted) if wanted else []


@dataclass(frozen=True)
class _Held:
    """Rows of documents that a rank holds, joined over its chunks: number, first row, rows, rows of the early chunk."""

    document: np.ndarray
    first: np.ndarray
    rows: np.ndarray
    early_rows: np.ndarray

    @staticmethod
    def of(pieces: HomePieces, rank: int) -> _Held:
        mine = pieces.where(pieces.rank == rank)
        first = mine.first_rows()
        document, at = np.unique(mine.document, return_index=True)
        number = np.searchsorted(document, mine.document)
        rows = np.bincount(number, weights=mine.rows, minlength=len(document)).astype(np.int64)
        early = np.bincount(number, weights=mine.rows * ~mine.late, minlength=len(document)).astype(np.int64)
        # A document in both chunks ends the early one and begins the late one, so its rows touch.
        return _Held(document, first[at], rows, early)

    def early(self) -> _Held:
        return _Held(self.document, self.first, self.early_rows, self.early_rows)

    def late(self) -> _Held:
        return _Held(self.document, self.first + self.early_rows, self.rows - self.early_rows, self.early_rows * 0)


def _step(q: _Held, kv: _Held, device: Destination) -> RingStep | None:
    _, mine, theirs = np.intersect1d(q.document[q.rows > 0], kv.document[kv.rows > 0], return_indices=True)
    if not len(mine):
        return None
    mine, theirs = np.flatnonzero(q.rows > 0)[mine], np.flatnonzero(kv.rows > 0)[theirs]
    borders = [np.concatenate(([0], np.cumsum(rows))) for rows in (q.rows[mine], kv.rows[theirs])]
    return RingStep(
        Picked.of(q.first[mine], q.rows[mine], device),
        Picked.of(kv.first[theirs], kv.rows[theirs], device),
        TaskBatch.of(borders[0], borders[1], device, causal=False),
    )


def merge(o: torch.Tensor, lse: torch.Tensor, o_new: torch.Tensor, lse_new: torch.Tensor) -> tuple[Any, Any]:
    """Join partial attentions of the same rows over different keys: o [rows, heads, head_dim], lse [rows, heads]."""
    share = torch.sigmoid(lse_new - lse)
    return torch.lerp(o, o_new.to(o.dtype), share[..., None]), torch.logaddexp(lse, lse_new)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ring: RingMicroBatch,
        kernel: Kernel,
        kind: AttentionKind,
        timer: Timer,
    ) -> torch.Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        block = torch.stack((k, v), dim=1)
        works: list[dist.Work] = []
        o, lse = torch.zeros_like(q, dtype=wide), q.new_zeros(q.shape[:2], dtype=wide)
        for number in range(ring.group.size):
            for work in works:
                work.wait()
            if number < len(ring.steps):
                incoming, works = ring.pass_on(block, number)
            if number == 0 and ring.rows:
                with timer("forward"):
                    o_new, lse = kernel.forward(q, block[:, 0], block[:, 1], ring.batch, kind)
                o, lse = o_new.to(wide), lse.contiguous()
            step = ring.steps[number - 1] if number else None
            if step is not None:
                kv = step.kv.take(block)
                with timer("forward"):
                    o_new, lse_new = kernel.forward(step.q.take(q), kv[:, 0], kv[:, 1], step.batch, kind)
                o_new, lse_new = merge(step.q.take(o), step.q.take(lse), o_new, lse_new)
                step.q.put(o, o_new)
                step.q.put(lse, lse_new)
            block = incoming
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.rest = (ring, kernel, kind, timer)
        return o

    @staticmethod
    def backward(ctx: Any, *do: torch.Tensor) -> Any:
        ring, kernel, kind, timer = ctx.rest
        q, k, v, o, lse = ctx.saved_tensors
        do_NHD = do[0].contiguous()
        wide = torch.promote_types(q.dtype, torch.float32)
        dq = torch.zeros_like(q, dtype=wide)
        block = torch.stack((k, v), dim=1)
        works: list[dist.Work] = []
        gradient = torch.zeros_like(block, dtype=wide)
        gradient_works: list[dist.Work] = []
        for number in range(ring.group.size):
            for work in works:
                work.wait()
            held = block
            if number < len(ring.steps):
                block, works = ring.pass_on(held, number)
            mine = torch.zeros_like(held, dtype=wide)
            if number == 0 and ring.rows:
                with timer("backward"):
                    parts = kernel.backward(do_NHD, q, held[:, 0], held[:, 1], o, lse, ring.batch, kind)
                dq += parts[0]
                mine[:, 0], mine[:, 1] = parts[1], parts[2]
            step = ring.steps[number - 1] if number else None
            if step is not None:
                rows = [step.q.take(x) for x in (do_NHD, q, o, lse)]
                kv = step.kv.take(held)
                with timer("backward"):
                    parts = kernel.backward(rows[0], rows[1], kv[:, 0], kv[:, 1], *rows[2:], step.batch, kind)
                step.q.add(dq, parts[0])
                step.kv.put(mine, torch.stack(parts[1:], dim=1).to(wide))
            for work in gradient_works:
                work.wait()
            gradient = gradient + mine
            gradient, gradient_works = ring.pass_on(gradient, number)
        for work in gradient_works:
            work.wait()
        return dq.to(q.dtype), gradient[:, 0].to(k.dtype), gradient[:, 1].to(v.dtype), None, None, None, None
