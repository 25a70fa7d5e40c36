"""From a sampled micro-batch to one rank's tokens and attention, for every baseline.

All modes get the same documents. Array legend: D documents, R data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.baselines.groups import CpGroup
from benchmarks.baselines.halo import HaloMicroBatch, halo_rows
from benchmarks.baselines.heads import routes_of
from benchmarks.baselines.per_document import GatheredMicroBatch
from benchmarks.baselines.ring import RingMicroBatch
from benchmarks.baselines.ulysses import UlyssesMicroBatch
from distca.attention import TaskBatch
from distca.baselines.layouts import HomePieces, layout_of, pieces_of
from distca.baselines.mode import Mode
from distca.device.host_to_device import Destination, Upload, uploading
from distca.plan import AttentionShape, Layout
from distca.runtime.recurrent_routes import RecurrentRoutes
from megatron_patches.steps.batch_context import PackedMicroBatch


@dataclass(frozen=True)
class Prepared:
    """One rank's part of a micro-batch under a baseline.

    Attributes:
        layout: where all tokens live.
        attention: how this rank computes its part.
        bytes_moved: bytes that all ranks of one tensor-parallel rank send for one layer, forward and backward; the
            mean over layers.
    """

    layout: Layout
    attention: PackedMicroBatch
    bytes_moved: int


@dataclass(frozen=True)
class Baseline:
    """A baseline on this rank: it lays micro-batches out and makes this rank's attention.

    Attributes:
        mode: how to train.
        ranks: data-parallel ranks.
        rank: this data-parallel rank.
        group: this rank's context-parallel group; None for methods without one.
        shape: attention heads of one tensor-parallel rank.
        windows: keys that a query sees, of every layer; 0 for all.
        halos: rows that convolutions of recurrent layers read before a row; empty without such layers.
    """

    mode: Mode
    ranks: int
    rank: int
    group: CpGroup | None
    shape: AttentionShape
    windows: Sequence[int] = (0,)
    halos: Collection[int] = ()

    def prepare(self, lengths: np.ndarray, group_of: np.ndarray, device: Destination) -> Prepared:
        """This rank's part of a micro-batch.

        Args:
            lengths: [D] tokens.
            group_of: [D] from :func:`groups_of`.
            device: where it runs; with an upload the attention is ready once that was sent.
        """
        pieces = pieces_of(self.mode, lengths, group_of)
        layout = layout_of(pieces, lengths, self.ranks)
        if self.group is None:
            mine = lengths[group_of == self.rank]
            borders = np.concatenate(([0], np.cumsum(mine)))
            with uploading(device) as upload:
                routes, batch = routes_of(mine, self.halos, upload), TaskBatch.of(borders, borders, upload)
            return Prepared(layout, PackedMicroBatch(batch, int(borders[-1]), recurrent=routes), 0)
        attention: PackedMicroBatch
        with uploading(device) as upload:
            if self.mode.method == "ulysses":
                recurrent = {size: RecurrentRoutes.of((layout,), self.rank, size, upload)[0] for size in self.halos}
                attention = UlyssesMicroBatch.of(pieces, lengths, group_of, self.group, upload, recurrent)
            else:
                attention = self._attention(pieces, lengths, self.group, upload)
        return Prepared(layout, attention, self._bytes_moved(layout))

    def _attention(self, pieces: HomePieces, lengths: np.ndarray, group: CpGroup, upload: Upload) -> PackedMicroBatch:
        method = self.mode.method
        if method == "ring":
            return RingMicroBatch.of(pieces, group, upload)
        if method == "cp-halo":
            return HaloMicroBatch.with_halos(pieces, lengths, group, upload, self.windows)
        return GatheredMicroBatch.of(pieces, lengths, group, upload, method == "cp-keep", self.halos)

    def _bytes_moved(self, layout: Layout) -> int:
        moved = _bytes(self.mode, layout.q_rows, self.shape)
        if self.mode.method != "cp-halo":
            return moved
        kv = 2 * self.shape.kv_bytes
        by_window = {each: kv * halo_rows(layout, each) if each else moved for each in set(self.windows)}
        return round(sum(by_window[each] for each in self.windows) / len(self.windows))


def _bytes(mode: Mode, q_rows: np.ndarray, shape: AttentionShape) -> int:
    """Bytes sent by all ranks for one layer, forward and backward."""
    others, q, kv = mode.degree - 1, shape.q_bytes, shape.kv_bytes
    rows = q_rows.reshape(-1, mode.degree)
    if mode.method == "ulysses":
        return int(q_rows.sum()) * (4 * q + 2 * kv) * others // mode.degree
    if mode.method == "ring":
        wide = kv * max(4 // shape.value_bytes, 1)
        return int(q_rows.sum()) * (2 * others * kv + mode.degree * wide)
    padded = int(rows.max(axis=1).sum()) * mode.degree
    return padded * others * kv * (3 if mode.method == "cp" else 2)
