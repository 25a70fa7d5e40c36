"""Layouts: where the tokens of every document live.

A micro-batch is a list of documents over ``ranks`` home ranks. It is processed as one or two *nano-batches* (ping and
pong), each with a layout of its own (``place/lay_out.py``). Where a document's head is computed in ping and its tail in
pong, the tail's queries need the head's keys and values. So pong's layout lists those rows as *carried*: they stay
where ping put them, and are exchanged again with pong's own rows.

Example: a document of 6 rows on two ranks, cut at row 4. In ping, rank 0 has rows 0 and 1, rank 1 has 2 and 3. In pong,
rank 0 has row 4 and rank 1 row 5. The k,v rows of pong are then 0, 1, 4 on rank 0, two of them carried, and 2, 3, 5 on
rank 1.

Array legend: D documents of the micro-batch, S shards, R ranks. All arrays are int64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from distca.plan.sorting import order_by


@dataclass(frozen=True)
class Shards:
    """Contiguous token ranges of documents and their home rows, sorted by (document, start).

    Attributes:
        document: [S] index of the document in the micro-batch.
        start: [S] first token of the range, as a position in the document.
        stop: [S] one past the last token.
        rank: [S] home rank.
        row: [S] row of token ``start`` in the home rank's tensor.
    """

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    rank: np.ndarray
    row: np.ndarray

    def __len__(self) -> int:
        return len(self.document)

    def on_rank(self, rank: int) -> Shards:
        """The shards that live on ``rank``, ordered by row."""
        mine = np.flatnonzero(self.rank == rank)
        mine = mine[np.argsort(self.row[mine], kind="stable")]
        return Shards(*(column[mine] for column in self.columns()))

    def columns(self) -> tuple[np.ndarray, ...]:
        return self.document, self.start, self.stop, self.rank, self.row


def overlaps(
    document: np.ndarray, start: np.ndarray, stop: np.ndarray, shards: Shards
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All pairs (range, shard) of one document that share tokens, and how many rows they share.

    Example: a document with shards [0, 4) and [4, 6) gives for the range [2, 5) two pairs, of 2 rows and of 1 row.

    Args:
        document: [N] document of each range.
        start: [N] first position of each.
        stop: [N] one past its last position.
        shards: the shards, sorted by (document, start).

    Returns:
        [P] each: index of the range, index of the shard, rows.
    """
    # A range's shards follow each other: ``count`` of them from number ``low`` on. They are all shards of its document,
    # or found by a search for its ends; there (document, position) is one number, document * span + position.
    shards_of = np.bincount(shards.document, minlength=int(document.max(initial=-1)) + 1)
    low = (np.cumsum(shards_of) - shards_of)[document]
    count = shards_of[document]
    # Most documents have one shard; only ranges of the others are searched.
    cut = np.flatnonzero(count > 1)
    if len(cut):
        document, span = document[cut], int(max(stop.max(), shards.stop.max())) + 1
        first = np.searchsorted(shards.document * span + shards.stop, document * span + start[cut], side="right")
        last = np.searchsorted(shards.document * span + shards.start, document * span + stop[cut], side="left")
        low[cut], count[cut] = first, np.maximum(last - first, 0)
    found = np.repeat(np.arange(len(low)), count)
    shard = np.arange(len(found)) - (np.cumsum(count) - count)[found] + low[found]
    rows = np.minimum(stop[found], shards.stop[shard]) - np.maximum(start[found], shards.start[shard])
    if len(rows) and rows.min() <= 0:
        some = rows > 0
        found, shard, rows = found[some], shard[some], rows[some]
    return found, shard, rows


@dataclass(frozen=True, eq=False)
class Layout:
    """One nano-batch: which rows are computed in it, and where their k,v rows live.

    A layout is equal only to itself, so that it can be the key of a memo.

    Attributes:
        ranks: number of home ranks, which is also the number of attention servers.
        first: [D] first query position of each document computed in this nano-batch.
        last: [D] one past the last one; ``first == last`` for a document with no rows here.
        q: shards of the query rows, covering [first, last) of every document.
        kv: shards of the key/value rows, covering [0, last) of every document with rows here. A rank's k,v rows are
            numbered with its carried rows first, then its own rows in the order of ``q``.
        q_rows: [R] query rows per rank.
        carried_rows: [R] rows that each rank carries over: this many of its last query rows in the previous nano-batch.
    """

    ranks: int
    first: np.ndarray
    last: np.ndarray
    q: Shards
    kv: Shards
    q_rows: np.ndarray
    carried_rows: np.ndarray

    @property
    def kv_rows(self) -> np.ndarray:
        """[R] k,v rows per rank: carried rows, then own rows."""
        return self.carried_rows + self.q_rows

    @property
    def tokens(self) -> int:
        """Query rows over all ranks."""
        return int(self.q_rows.sum())

    @property
    def carried(self) -> np.ndarray:
        """[S] bool: the shards of ``kv`` that the previous nano-batch computed."""
        return np.asarray(self.kv.row < self.carried_rows[self.kv.rank])

    def within(self, window: int) -> Layout:
        """The layout for a kind of layer whose queries see ``window`` keys; 0 for all.

        Only the carried rows that some query still sees are left: the ``window`` - 1 before its document's first row in
        this nano-batch."""
        # Carried shards begin later, or vanish. Rows of a rank are then numbered anew: its carried ones first, in the
        # order that they had, then its own, which move up.
        carried = self.carried
        if not window or not carried.any():
            return self
        kv = self.kv
        start = np.where(carried, np.maximum(kv.start, self.first[kv.document] - window + 1), kv.start)
        left = start < kv.stop
        document, start, stop, rank, row = kv.document[left], start[left], kv.stop[left], kv.rank[left], kv.row[left]
        carried, rows = carried[left], stop - start
        carried_rows = np.bincount(rank[carried], rows[carried], self.ranks).astype(np.int64)
        row -= (self.carried_rows - carried_rows)[rank]
        some = np.flatnonzero(carried)
        some = some[order_by(rank[some], kv.row[left][some])]
        row[some] = np.cumsum(rows[some]) - rows[some] - (np.cumsum(carried_rows) - carried_rows)[rank[some]]
        return replace(self, kv=Shards(document, start, stop, rank, row), carried_rows=carried_rows)

    def carried_from(self, previous: Layout | None, rank: int) -> list[tuple[int, int]]:
        """Returns where the carried rows of ``rank`` are: row ranges (begin, end) in the ``previous`` nano-batch, in
        order."""
        if previous is None or not self.carried_rows[rank]:
            return []
        here = self.kv.on_rank(rank)
        there = previous.q.on_rank(rank)
        ranges: list[tuple[int, int]] = []
        for document, start, stop, row in zip(
            *(x.tolist() for x in (here.document, here.start, here.stop, here.row)), strict=True
        ):
            if row >= self.carried_rows[rank]:
                break
            (at,) = np.flatnonzero((there.document == document) & (there.start <= start) & (stop <= there.stop))
            begin = int(there.row[at] + start - there.start[at])
            if ranges and ranges[-1][1] == begin:
                ranges[-1] = ranges[-1][0], begin + stop - start
            else:
                ranges.append((begin, begin + stop - start))
        return ranges
