"""From a sampled micro-batch to one rank's tokens and attention, for every baseline.

All modes get the same documents. Array legend: D documents, R data-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.baselines.errors import BaselineError
from benchmarks.baselines.groups import CpGroup
from benchmarks.baselines.layouts import Pieces, contiguous, head_tail, layout_of, whole, zigzag
from benchmarks.baselines.mode import Mode
from benchmarks.baselines.per_document import GatheredMicroBatch
from benchmarks.baselines.ring import RingMicroBatch
from benchmarks.baselines.ulysses import UlyssesMicroBatch
from benchmarks.baselines.work import Work, deal
from distca.attention import TaskBatch
from distca.device.host_to_device import Destination, Upload, uploading
from distca.plan import AttentionShape, Layout
from megatron_patches.batch_context import PackedMicroBatch

VARIABLE_ROOM = 2
"""Variable-length packing may put this many times its share of tokens on a rank."""


@dataclass(frozen=True)
class Prepared:
    """One rank's part of a micro-batch under a baseline.

    Attributes:
        layout: where all tokens live.
        attention: how this rank computes its part.
        bytes_moved: bytes that all ranks of one tensor-parallel rank send for one layer, forward and backward.
    """

    layout: Layout
    attention: PackedMicroBatch
    bytes_moved: int


def groups_of(
    mode: Mode, lengths: np.ndarray, bin_of: np.ndarray, bins: int, ranks: int, room: int, work: Work
) -> np.ndarray:
    """[D] context-parallel group of each document; for methods without groups, its rank.

    "packed" keeps the ranks that the sampler chose, as plain packing does. Groups get equal work where their tokens
    allow it, else what the sampler put on their ranks.

    Args:
        mode: a baseline.
        lengths: [D] tokens.
        bin_of: [D] bin in which the sampler packed each document.
        bins: bins that the sampler packed; each is one rank or several.
        ranks: data-parallel ranks, a multiple of ``bins``.
        room: tokens of a rank.
        work: what a document costs.

    Raises:
        BaselineError: a document does not fit into a rank or a group of this mode.
    """
    longest, groups = int(lengths.max(initial=0)), ranks // mode.degree
    if mode.method == "variable":
        dealt = deal(lengths, ranks, work, VARIABLE_ROOM * room)
        if dealt is None:
            raise BaselineError(
                f"variable keeps documents whole and gives a rank up to {VARIABLE_ROOM} × {room:,} tokens; a document "
                f"of {longest:,} tokens, or the sum of all, does not fit. Raise the tokens per rank."
            )
        return dealt
    if groups > bins:
        raise BaselineError(
            f"{mode.name} keeps a document on {mode.degree} × {room:,} tokens, but this context needs {ranks // bins} "
            f"ranks; choose a degree of {ranks // bins} or more, or raise the tokens per rank."
        )
    as_sampled = bin_of // (bins // groups)
    if mode.method == "packed":
        return as_sampled
    dealt = deal(lengths, groups, work, mode.degree * room)
    return as_sampled if dealt is None else dealt


def prepare(
    mode: Mode,
    lengths: np.ndarray,
    group_of: np.ndarray,
    ranks: int,
    group: CpGroup | None,
    rank: int,
    shape: AttentionShape,
    device: Destination,
) -> Prepared:
    """Lay a micro-batch out and make this rank's attention.

    Args:
        mode: a baseline.
        lengths: [D] tokens.
        group_of: [D] from :func:`groups_of`.
        ranks: data-parallel ranks.
        group: this rank's context-parallel group; None for methods without one.
        rank: this data-parallel rank.
        shape: attention heads of one tensor-parallel rank.
        device: where it runs; with an upload the attention is ready once that was sent.
    """
    if group is None:
        pieces = whole(lengths, group_of)
        borders = np.concatenate(([0], np.cumsum(lengths[group_of == rank])))
        packed = PackedMicroBatch(TaskBatch.of(borders, borders, device), int(borders[-1]))
        return Prepared(layout_of(pieces, lengths, ranks), packed, 0)
    method = {"cp": head_tail, "cp-keep": head_tail, "ring": zigzag, "ulysses": contiguous}[mode.method]
    pieces = method(lengths, group_of, mode.degree)
    layout = layout_of(pieces, lengths, ranks)
    with uploading(device) as upload:
        attention = _attention(mode, pieces, lengths, group_of, group, upload)
    return Prepared(layout, attention, _bytes(mode, layout.q_rows, shape))


def _attention(
    mode: Mode,
    pieces: Pieces,
    lengths: np.ndarray,
    group_of: np.ndarray,
    group: CpGroup,
    upload: Upload,
) -> PackedMicroBatch:
    if mode.method == "ring":
        return RingMicroBatch.of(pieces, group, upload)
    if mode.method == "ulysses":
        return UlyssesMicroBatch.of(pieces, lengths, group_of, group, upload)
    return GatheredMicroBatch.of(pieces, lengths, group, upload, mode.method == "cp-keep")


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
    return padded * others * kv * (2 if mode.method == "cp-keep" else 3)
