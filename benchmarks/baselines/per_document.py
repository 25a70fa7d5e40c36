"""Per-document context parallelism: head–tail pieces of each document, all-gathered keys and values (arXiv 2503.17924).

Every rank gets all keys and values of its group and picks the context of each of its pieces. All pieces are one fused
batch. In backward the group's keys and values are gathered again, or kept; their gradients go home by one
all-to-all in the activations' dtype and are added there in float32, in the order of ranks.

Shape suffixes: N rows of the rank, T query rows, S key/value rows of the fused batch; C ranks of the group, M rows of
the group's fullest rank; H query heads, G key/value heads, D head dimension. Keys and values travel together, as
kv_N2GD, or as [N, G, key and value] where values are narrower than keys.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.baselines.groups import CpGroup
from benchmarks.baselines.heads import GroupHeads
from benchmarks.baselines.rows import Picked
from distca.attention import Kernel, TaskBatch
from distca.attention.kernel import Timer
from distca.attention.sink import sink_gradient, with_sink
from distca.baselines.layouts import HomePieces
from distca.device.host_to_device import Destination
from distca.plan import AttentionKind
from distca.plan.sorting import expand
from distca.recurrent import Recurrence
from distca.runtime import AttentionPool
from distca.runtime.server import keys_and_values
from megatron_patches.steps.batch_context import PackedMicroBatch


@dataclass(frozen=True)
class GatheredMicroBatch(PackedMicroBatch):
    """A rank's pieces of a group's documents.

    Attributes:
        group: the context-parallel group.
        most: rows of the group's fullest rank; ranks differ by a row, and the all-gather pads to it.
        tails: gathered rows that the tail pieces' tasks read, task by task.
        heads: the same for head pieces.
        keep: keep gathered keys and values for backward.
        whole: how recurrent layers get whole documents.
    """

    group: CpGroup
    most: int
    tails: Picked
    heads: Picked
    keep: bool
    whole: GroupHeads | None = field(default=None, kw_only=True)

    def recur(self, pool: AttentionPool, layer: int, what: Recurrence, *rest: Any) -> torch.Tensor:
        if self.whole is None:
            return super().recur(pool, layer, what, *rest)
        return self.whole.recur(pool, layer, what, *rest)

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
        if not self.most:
            return q_NHD[..., : v_NGD.shape[2]] * 0
        return Gathered.apply(q_NHD, k_NGD, v_NGD, sink_H, self, kernel, kind, timer)

    @staticmethod
    def of(
        pieces: HomePieces,
        lengths: np.ndarray,
        group: CpGroup,
        device: Destination,
        keep: bool,
        halos: Collection[int] = (),
    ) -> GatheredMicroBatch:
        """This rank's micro-batch. ``pieces``: head–tail pieces of all groups; ``halos``: rows that convolutions of
        recurrent layers read before a row."""
        first_rank = group.number * group.size
        ours = pieces.where((pieces.rank >= first_rank) & (pieces.rank < first_rank + group.size))
        rows = np.bincount(ours.rank - first_rank, weights=ours.rows, minlength=group.size).astype(np.int64)
        most = int(rows.max())
        # Where every token of the group's documents is gathered to: documents one after the other, tokens in order.
        length = np.zeros(len(lengths), np.int64)
        length[ours.document] = np.asarray(lengths)[ours.document]
        offset = np.cumsum(length) - length
        place = np.empty(int(length.sum()), np.int64)
        gathered = (ours.rank - first_rank) * most + ours.first_rows()
        place[expand(offset[ours.document] + ours.start, ours.rows)] = expand(gathered, ours.rows)
        mine = ours.where(ours.rank == first_rank + group.rank)

        def context(chosen: HomePieces) -> Picked:
            read = place[expand(offset[chosen.document], chosen.stop)]
            return Picked.of(read, np.ones_like(read), device)

        borders = [np.concatenate(([0], np.cumsum(count))) for count in (mine.rows, mine.stop)]
        whole = None
        if halos:
            own = int(mine.rows.sum()), most, place, length[length > 0]
            whole = GroupHeads.of(group, *own, halos, device)
        return GatheredMicroBatch(
            TaskBatch.of(borders[0], borders[1], device),
            int(mine.rows.sum()),
            group,
            most,
            context(mine.where(mine.late)),
            context(mine.where(~mine.late)),
            keep,
            whole=whole,
        )

    def gather(self, k_NGD: torch.Tensor, v_NGD: torch.Tensor) -> torch.Tensor:
        """kv_S2GD: the group's keys and values, as this rank's tasks read them."""
        own = _room(self.most, k_NGD, v_NGD)
        keys, values = keys_and_values(own, k_NGD.shape[2])
        keys[: self.rows], values[: self.rows] = k_NGD, v_NGD
        everyone = own.new_empty(self.group.size * self.most, *own.shape[1:])
        dist.all_gather_into_tensor(everyone, own, group=self.group.group)
        return torch.cat((self.tails.take(everyone), self.heads.take(everyone)))

    def reduce(self, dk_SGD: torch.Tensor, dv_SGD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """dk_NGD and dv_NGD of this rank's rows, added up over the group."""
        wide = torch.promote_types(dk_SGD.dtype, torch.float32)
        mine = _room(self.group.size * self.most, dk_SGD, dv_SGD)
        tails = self.tails.rows
        for part, gradient in zip(keys_and_values(mine, dk_SGD.shape[2]), (dk_SGD, dv_SGD), strict=True):
            self.tails.put(part, gradient[:tails])
            # A head's context is also its tail's, so this adds two numbers and rounds once.
            total = self.heads.take(part).to(wide) + gradient[tails:]
            self.heads.put(part, total.to(mine.dtype))
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.group.group)
        parts_CM2GD = theirs.view(self.group.size, self.most, *theirs.shape[1:])[:, : self.rows]
        return keys_and_values(parts_CM2GD.sum(0, dtype=wide).to(dk_SGD.dtype), dk_SGD.shape[2])


def _room(rows: int, k_SGD: torch.Tensor, v_SGD: torch.Tensor) -> torch.Tensor:
    """Zeros for so many rows of keys and values."""
    heads, key_dim = k_SGD.shape[1:]
    return k_SGD.new_zeros(
        rows, *((2, heads, key_dim) if k_SGD.shape == v_SGD.shape else (heads, key_dim + v_SGD.shape[2]))
    )


class Gathered(torch.autograd.Function):
    """Core attention over keys and values that a micro-batch or a halo gathers, and whose gradients it adds up."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        micro_batch: GatheredMicroBatch,
        kernel: Kernel,
        kind: AttentionKind,
        timer: Timer,
    ) -> torch.Tensor:
        kv = micro_batch.gather(k, v)
        ctx.rest = (micro_batch, kernel, kind, timer)
        # What the kernel reads, or what that is gathered from again.
        source = (None, None, kv) if micro_batch.keep else (k, v, None)
        if not micro_batch.rows:
            ctx.save_for_backward(q, q, q, sink, *source)
            return torch.zeros_like(q[..., : v.shape[2]])
        with timer("forward"):
            o, lse = kernel.forward(q, *keys_and_values(kv, q.shape[2]), micro_batch.batch, kind)
            if sink is not None:
                o, lse = with_sink(o, lse, sink)
        ctx.save_for_backward(q, o, lse, sink, *source)
        return o

    @staticmethod
    def backward(ctx: Any, *do: torch.Tensor) -> Any:
        micro_batch, kernel, kind, timer = ctx.rest
        q, o, lse, sink, k, v, kv = ctx.saved_tensors
        of_sink = None if sink is None else torch.zeros_like(sink)
        if not micro_batch.keep:
            kv = micro_batch.gather(k, v)
        keys, values = keys_and_values(kv, q.shape[2])
        if micro_batch.rows:
            with timer("backward"):
                do_THD = do[0].contiguous()
                dq, dk, dv = kernel.backward(do_THD, q, keys, values, o, lse, micro_batch.batch, kind)
                if sink is not None:
                    of_sink = sink_gradient(do_THD, o, lse, sink)
        else:
            dq, dk, dv = torch.zeros_like(q), torch.zeros_like(keys), torch.zeros_like(values)
        return (dq, *micro_batch.reduce(dk, dv), of_sink, None, None, None, None)
