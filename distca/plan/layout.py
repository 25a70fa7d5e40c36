"""Layouts: the home rank and row of every token of a nano-batch.

A micro-batch is a list of documents whose rows lie on several ranks, their *homes*. It is computed as one or two
*nano-batches*, ping and pong: the transfers of one run beside the computation of the other. Each nano-batch has a
layout, for example from ``place/lay_out.py``. A *server* is a rank that computes attention.

A document may have its first rows in ping and its last rows in pong. The queries in pong then need the keys and values
of the first rows too. In pong's layout these rows are *carried*: they stay on the ranks that have them since ping.

Example: a document of 6 rows on two ranks, cut at row 4. In ping, rank 0 has rows 0 and 1, and rank 1 has rows 2 and 3.
In pong, rank 0 has row 4 and rank 1 has row 5. Then the k,v rows of pong are 0, 1, 4 on rank 0, and 2, 3, 5 on rank 1.
Rows 0 to 3 are carried.

Array legend: D documents of the micro-batch, S shards, R ranks, N ranges. All arrays are int64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from distca.plan.sorting import order_by


@dataclass(frozen=True)
class Shards:
    """Contiguous token ranges of documents and their home ranks, sorted by (document, start).

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
        """Returns the shards that lie on ``rank``, ordered by row."""
        mine = np.flatnonzero(self.rank == rank)
        mine = mine[np.argsort(self.row[mine], kind="stable")]
        return Shards(*(column[mine] for column in self.columns()))

    def columns(self) -> tuple[np.ndarray, ...]:
        """Returns document, start, stop, rank and row of all shards."""
        return self.document, self.start, self.stop, self.rank, self.row


def overlaps(
    document: np.ndarray, start: np.ndarray, stop: np.ndarray, shards: Shards
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds all pairs of a range and a shard of the same document that have rows in common.

    Example: a document with shards [0, 4) and [4, 6) gives for the range [2, 5) two pairs, with 2 rows and with 1 row.

    Args:
        document: [N] document of each range.
        start: [N] first position of each range.
        stop: [N] one past the last position of each range.
        shards: shards, sorted by (document, start).

    Returns:
        Three arrays with an element for each pair: index of the range, index of the shard, rows in common.
    """
    # The shards of a range follow each other: "count" shards, from index "low" on. If a document has several shards,
    # the ends of the range are searched. For the search, (document, position) is one number, document * span +
    # position.
    shards_of = np.bincount(shards.document, minlength=int(document.max(initial=-1)) + 1)
    low = (np.cumsum(shards_of) - shards_of)[document]
    count = shards_of[document]
    # Most documents have one shard, and their ranges need no search.
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
    """The rows that one nano-batch computes, the k,v rows that it needs for these, and the homes of all.

    A layout is equal only to itself, so that it can be a key of a dictionary.

    Attributes:
        ranks: number of home ranks; also the number of servers.
        first: [D] position of each document's first row that is computed in this nano-batch.
        last: [D] one past the last row; ``first == last`` for a document without rows here.
        q: shards of the query rows, covering [first, last) of every document.
        kv: shards of the key/value rows, covering [0, last) of every document with rows here. ``row`` counts a rank's
            k,v rows: first its carried rows, then its own rows in the order of ``q``.
        q_rows: [R] query rows of each rank.
        carried_rows: [R] carried rows of each rank.
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
        """Returns [R] k,v rows of each rank: carried rows and own rows."""
        return self.carried_rows + self.q_rows

    @property
    def tokens(self) -> int:
        """Returns the query rows of all ranks together."""
        return int(self.q_rows.sum())

    @property
    def carried(self) -> np.ndarray:
        """Returns [S] bool: whether each shard of ``kv`` is carried from the previous nano-batch."""
        return np.asarray(self.kv.row < self.carried_rows[self.kv.rank])

    def within(self, window: int) -> Layout:
        """Returns the layout for a kind of layer whose queries see ``window`` keys; 0 for all keys.

        Carried rows that no query of this nano-batch sees are left out."""
        # Each document keeps the ``window`` - 1 rows before its first row here. Then the k,v rows of each rank are
        # numbered anew: first carried rows, then own rows.
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
        """Returns, in order, the rows of the ``previous`` nano-batch that ``rank`` carries over, as ranges (begin,
        end)."""
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
