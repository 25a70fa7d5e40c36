"""The tokens that each rank holds of each document, by method.

A rank's rows are pieces of documents in the order given. Array legend: D documents, P pieces; all arrays are int64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.baselines.mode import Mode
from distca.plan import Layout, Shards


@dataclass(frozen=True)
class HomePieces:
    """Ranges of documents and where they live, in the order of rows on each rank.

    Attributes:
        document: [P] number in the micro-batch.
        start: [P] first position.
        stop: [P] one past the last.
        rank: [P] data-parallel rank.
        late: [P] bool, for head–tail and zigzag layouts: of the rank's second half.
    """

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    rank: np.ndarray
    late: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """[P] rows of each piece."""
        return self.stop - self.start

    def where(self, chosen: np.ndarray) -> HomePieces:
        """The chosen pieces, by mask or numbers."""
        return HomePieces(*(x[chosen] for x in (self.document, self.start, self.stop, self.rank, self.late)))

    def first_rows(self) -> np.ndarray:
        """[P] row of each piece on its rank."""
        first = np.empty(len(self.rank), np.int64)
        for rank in np.unique(self.rank):
            mine = self.rank == rank
            first[mine] = np.cumsum(self.rows[mine]) - self.rows[mine]
        return first


def layout_of(pieces: HomePieces, lengths: np.ndarray, ranks: int) -> Layout:
    """The layout that reads and labels these pieces."""
    order = np.lexsort((pieces.start, pieces.document))
    columns = (pieces.document, pieces.start, pieces.stop, pieces.rank, pieces.first_rows())
    shards = Shards(*(column[order] for column in columns))
    rows = np.bincount(pieces.rank, weights=pieces.rows, minlength=ranks).astype(np.int64)
    none = np.zeros(ranks, np.int64)
    return Layout(ranks, np.zeros(len(lengths), np.int64), np.asarray(lengths, np.int64), shards, shards, rows, none)


def whole(lengths: np.ndarray, rank_of: np.ndarray) -> HomePieces:
    """Whole documents on their ranks."""
    documents = np.arange(len(lengths))
    return HomePieces(documents, np.zeros_like(documents), np.asarray(lengths), rank_of, np.zeros(len(lengths), bool))


def head_tail(lengths: np.ndarray, group_of: np.ndarray, degree: int) -> HomePieces:
    """Every document in 2 · degree pieces. Rank r of its group holds number r and number 2 · degree − 1 − r.

    Pieces differ by at most a token. The odd tokens go round over the ranks, so the ranks of a group hold equally many
    rows within one. The last rank's two pieces touch and are one. A rank's rows are all its tails, then all its heads.
    """
    length = np.asarray(lengths, np.int64)
    base, odd = np.divmod(length, 2 * degree)
    first_odd = np.empty_like(odd)
    for group in np.unique(group_of):
        mine = group_of == group
        first_odd[mine] = np.cumsum(odd[mine]) - odd[mine]
    ranks = np.arange(degree)
    turn = (ranks[None] - first_odd[:, None]) % degree
    heads = base[:, None] + (turn < odd[:, None])
    tails = base[:, None] + (turn + degree < odd[:, None])
    sizes = np.concatenate((heads, tails[:, ::-1]), axis=1)  # [D, 2 · degree] in order of position
    stops = np.cumsum(sizes, axis=1)
    starts = stops - sizes
    parts = []
    for late in (True, False):
        for rank in range(degree if late else degree - 1):
            piece = 2 * degree - 1 - rank if late else rank
            begin = starts[:, degree - 1] if late and rank == degree - 1 else starts[:, piece]
            home = group_of * degree + rank
            parts.append(HomePieces(np.arange(len(length)), begin, stops[:, piece], home, np.full(len(length), late)))
    return _filled(parts)


def zigzag(lengths: np.ndarray, group_of: np.ndarray, degree: int) -> HomePieces:
    """Each group's documents as one sequence in 2 · degree equal chunks. Rank r holds number r and number 2 · degree −
    1 − r."""
    pieces = _cut_sequences(lengths, group_of, 2 * degree)
    chunk = pieces.rank % (2 * degree)
    late = chunk >= degree
    group = pieces.rank // (2 * degree)
    pieces = HomePieces(
        pieces.document,
        pieces.start,
        pieces.stop,
        group * degree + np.where(late, 2 * degree - 1 - chunk, chunk),
        late,
    )
    # Stable: a rank's early chunk comes before its late one, because chunks are in order.
    return pieces.where(np.argsort(pieces.rank, kind="stable"))


def contiguous(lengths: np.ndarray, group_of: np.ndarray, degree: int) -> HomePieces:
    """Each group's documents as one sequence in ``degree`` equal parts, one for each rank."""
    return _cut_sequences(lengths, group_of, degree)


def pieces_of(mode: Mode, lengths: np.ndarray, group_of: np.ndarray) -> HomePieces:
    """The pieces of a mode that is not DistCA; [D] ``group_of`` as :func:`distca.baselines.dealing.groups_of` says."""
    methods = {"cp": head_tail, "cp-keep": head_tail, "cp-halo": head_tail, "ring": zigzag, "ulysses": contiguous}
    methods |= {"megatron-te-p2p": head_tail, "megatron-te-a2a": head_tail}
    if mode.method not in methods:
        return whole(lengths, group_of)
    return methods[mode.method](lengths, group_of, mode.degree)


def _cut_sequences(lengths: np.ndarray, group_of: np.ndarray, parts: int) -> HomePieces:
    """Every group's documents, one after the other, cut into equal parts; ``rank`` is group · parts + part."""
    found = []
    for group in np.unique(group_of):
        documents = np.flatnonzero(group_of == group)
        own = np.asarray(lengths, np.int64)[documents]
        ends = np.cumsum(own)
        total = int(ends[-1])
        bounds = total * np.arange(parts + 1) // parts
        cuts = np.unique(np.concatenate((ends - own, bounds[:-1][bounds[:-1] < bounds[1:]])))
        tops = np.append(cuts[1:], total)
        at = np.searchsorted(ends, cuts, side="right")
        part = np.searchsorted(bounds, cuts, side="right") - 1
        begin = cuts - (ends - own)[at]
        found.append(
            HomePieces(documents[at], begin, begin + tops - cuts, group * parts + part, np.zeros(len(cuts), bool))
        )
    return _filled(found)


def _filled(parts: list[HomePieces]) -> HomePieces:
    """All parts, without their empty pieces."""
    columns = ("document", "start", "stop", "rank", "late")
    joined = HomePieces(*(np.concatenate([getattr(part, column) for part in parts]) for column in columns))
    return joined.where(joined.rows > 0)
