"""Per-document context parallelism that exchanges halos alone in layers with windows.

A query of a layer with window w sees the w - 1 rows before it. So every piece of a document needs its own rows and the
w - 1 before them. They come from the ranks that hold them by one all-to-all and are kept for backward, which returns
their gradients the same way; those are added in float32, in the order of ranks. Layers without a window gather all keys
and values as ``per_document.py`` says, and keep them.

Shape suffixes: N rows of the rank, S key/value rows of the fused batch, F rows of it that other pieces hold; G
key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.baselines.groups import CpGroup
from benchmarks.baselines.per_document import Gathered, GatheredMicroBatch
from distca.attention import Kernel, TaskBatch
from distca.attention.kernel import Timer
from distca.baselines.layouts import HomePieces
from distca.device.host_to_device import Destination, to_device
from distca.plan import AttentionKind, Layout
from distca.plan.geometry import first_key
from distca.plan.layout import overlaps
from distca.plan.sorting import expand
from distca.transport.gather_scatter import move_rows
from distca.transport.row_moves import Reduction


@dataclass(frozen=True)
class Halo:
    """The rows that a rank's pieces read in layers with one window.

    Attributes:
        batch: borders of its tasks.
        rows: rows of the rank.
        read: key/value rows of all tasks.
        own: [N] int64 where the rank's own rows lie among those.
        fetched: [F] int64 where the rows lie that other pieces hold: by the rank that has them, this rank last.
        sent: int64 own rows that other pieces read: by the rank that reads them, this rank last.
        receive_counts: rows from every other rank of the group; 0 from itself.
        send_counts: rows for every other rank of the group; 0 for itself.
        travelling: rows that travel in the whole group.
        sum: adds what comes back to the gradients of own rows; None where nothing does.
        group: the context-parallel group.
        keep: halos are kept for backward.
    """

    batch: TaskBatch
    rows: int
    read: int
    own: torch.Tensor
    fetched: torch.Tensor
    sent: torch.Tensor
    receive_counts: list[int]
    send_counts: list[int]
    travelling: int
    sum: Reduction | None
    group: CpGroup
    keep: bool = True

    @staticmethod
    def of(pieces: HomePieces, lengths: np.ndarray, group: CpGroup, device: Destination, window: int) -> Halo:
        """This rank's halo. ``pieces``: of all groups."""
        members = range(group.size)
        place = pieces.rank - group.number * group.size
        held = [pieces.where(place == each) for each in members]
        offset = np.cumsum(lengths) - lengths
        holder, row = (np.zeros(int(np.sum(lengths)), np.int64) for _ in range(2))
        for each, mine in zip(members, held, strict=True):
            tokens = expand(offset[mine.document] + mine.start, mine.rows)
            holder[tokens], row[tokens] = each, expand(mine.first_rows(), mine.rows)
        reads = [_Reads.of(mine, offset, window) for mine in held]
        mine, me = held[group.rank], group.rank

        def read_of(reader: int, owner: int) -> np.ndarray:
            """Tells which of the rows that a rank fetches are another's."""
            return np.flatnonzero(holder[reads[reader].tokens] == owner)

        order = [*(each for each in members if each != me), me]
        counts = np.array([[len(read_of(reader, owner)) for owner in members] for reader in members])
        fetched = np.concatenate([reads[me].at[read_of(me, owner)] for owner in order])
        sent = np.concatenate([row[reads[reader].tokens[read_of(reader, me)]] for reader in order])
        np.fill_diagonal(counts, 0)
        rows, own_rows = mine.stop - reads[me].first, int(mine.rows.sum())
        q, kv = (np.concatenate(([0], np.cumsum(each))) for each in (mine.rows, rows))
        return Halo(
            TaskBatch.of(q, kv, device),
            own_rows,
            int(kv[-1]),
            to_device(expand(kv[1:] - mine.rows, mine.rows), device),
            to_device(fetched, device),
            to_device(sent, device),
            counts[me].tolist(),
            counts[:, me].tolist(),
            int(counts.sum()),
            Reduction.of(sent, np.arange(own_rows), device),
            group,
        )

    def gather(self, k_NGD: torch.Tensor, v_NGD: torch.Tensor) -> torch.Tensor:
        """kv_S2GD as this rank's tasks read them."""
        kv_N2GD = torch.stack((k_NGD, v_NGD), dim=1)
        kv_S2GD = kv_N2GD.new_empty(self.read, *kv_N2GD.shape[1:])
        move_rows(kv_N2GD, None, kv_S2GD, self.own)
        halo_F2GD = self._exchange(kv_N2GD, self.sent, self.send_counts, self.fetched, self.receive_counts)
        move_rows(halo_F2GD, None, kv_S2GD, self.fetched)
        return kv_S2GD

    def reduce(self, dk_SGD: torch.Tensor, dv_SGD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """dk_NGD and dv_NGD of this rank's rows, added up over the pieces that read them."""
        dkv_S2GD = torch.stack((dk_SGD, dv_SGD), dim=1)
        dkv_N2GD = dkv_S2GD.index_select(0, self.own)
        returned = self._exchange(dkv_S2GD, self.fetched, self.receive_counts, self.sent, self.send_counts)
        if self.sum is not None:
            self.sum.add(returned, dkv_N2GD)
        return dkv_N2GD[:, 0], dkv_N2GD[:, 1]

    def _exchange(
        self, x: torch.Tensor, away: torch.Tensor, to: list[int], here: torch.Tensor, come: list[int]
    ) -> torch.Tensor:
        """Rows ``away`` of ``x`` go to their ranks; returns those for ``here``, the rank's own last."""
        leaving = x.index_select(0, away)
        coming = leaving.new_empty(len(here), *leaving.shape[1:])
        if self.travelling:
            dist.all_to_all_single(coming[: sum(come)], leaving[: sum(to)], come, to, group=self.group.group)
        coming[sum(come) :] = leaving[sum(to) :]
        return coming


@dataclass(frozen=True)
class _Reads:
    """The rows that a rank's tasks read beside its own.

    Attributes:
        first: first key of every piece.
        tokens: number of every row among the tokens of all documents.
        at: where it lies among the rows of all tasks.
    """

    first: np.ndarray
    tokens: np.ndarray
    at: np.ndarray

    @staticmethod
    def of(pieces: HomePieces, offset: np.ndarray, window: int) -> _Reads:
        first = first_key(window, pieces.start)
        before, rows = pieces.start - first, pieces.stop - first
        begin = np.cumsum(rows) - rows
        return _Reads(first, expand(offset[pieces.document] + first, before), expand(begin, before))


@dataclass(frozen=True)
class HaloMicroBatch(GatheredMicroBatch):
    """A rank's pieces of a group's documents.

    Attributes:
        halos: by window of the model's layers.
    """

    halos: dict[int, Halo]

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
        if not self.most or not kind.window:
            return super().attend(kernel, q_NHD, k_NGD, v_NGD, kind, timer, sink_H)
        return Gathered.apply(q_NHD, k_NGD, v_NGD, sink_H, self.halos[kind.window], kernel, kind, timer)

    @staticmethod
    def with_halos(
        pieces: HomePieces, lengths: np.ndarray, group: CpGroup, device: Destination, windows: Iterable[int]
    ) -> HaloMicroBatch:
        """This rank's micro-batch. ``pieces``: head–tail pieces of all groups."""
        whole = GatheredMicroBatch.of(pieces, lengths, group, device, keep=True)
        each = {window: Halo.of(pieces, lengths, group, device, window) for window in sorted(set(windows) - {0})}
        return HaloMicroBatch(whole.batch, whole.rows, group, whole.most, whole.tails, whole.heads, whole.keep, each)


def halo_rows(layout: Layout, window: int) -> int:
    """Rows that travel between ranks in one layer with a window, forward or backward."""
    q = layout.q
    piece, holder, rows = overlaps(q.document, first_key(window, q.start), q.start, q)
    return int(rows[q.rank[piece] != q.rank[holder]].sum())
