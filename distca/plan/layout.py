"""A *layout* has the home rank and row of every token of a nano-batch.

Each token is one *row* of q, k and v on one rank, the row's *home*. A micro-batch is computed in one or two parts, the
*nano-batches* ping and pong. A document may have its first rows in ping and its last rows in pong. The queries in pong
then also need the keys and values of the first rows. These k,v rows are *carried*: they are in pong's layout too.

Example: a document of 6 rows is on two ranks.

| | rank 0 | rank 1 |
|---|---|---|
| query rows in ping | 0, 1 | 2, 3 |
| query rows in pong | 4 | 5 |
| k,v rows in pong | 0, 1 (carried), 4 | 2, 3 (carried), 5 |

Array legend: S shards, R ranks, N ranges, D documents. D counts the documents of the micro-batch; with pipeline stages,
of all micro-batches that are planned together. All arrays are int64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from distca.plan.sorting import order_by


@dataclass(frozen=True)
class Shards:
    """Ranges of documents, each on one home rank; in a :class:`Layout`, sorted by (document, start).

    Attributes:
        document: [S] index of the document, from 0 to D - 1.
        start: [S] first position of the range in the document.
        stop: [S] one past the last position.
        rank: [S] home rank.
        row: [S] row of position ``start`` in the home rank's tensor.
    """

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    rank: np.ndarray
    row: np.ndarray

    def __len__(self) -> int:
        return len(self.document)

    def on_rank(self, rank: int) -> Shards:
        """Returns the shards on ``rank``, ordered by row."""
        mine = np.flatnonzero(self.rank == rank)
        mine = mine[np.argsort(self.row[mine], kind="stable")]
        return Shards(*(column[mine] for column in self.columns()))

    def columns(self) -> tuple[np.ndarray, ...]:
        return self.document, self.start, self.stop, self.rank, self.row


def overlaps(
    document: np.ndarray, start: np.ndarray, stop: np.ndarray, shards: Shards
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds all pairs of a range and a shard of the same document that have rows in common.

    Example: a document has the shards [0, 4) and [4, 6). The range [2, 5) has 2 rows in common with the first shard and
    1 row with the second.

    ``document``, ``start`` and ``stop`` [N] are the ranges [start, stop). Returns three arrays with an element for each
    pair: index of the range, index of the shard, number of rows in common.
    """
    # A range is paired with "count" shards, from index "low" on. At first these are all shards of its document.
    shards_of = np.bincount(shards.document, minlength=int(document.max(initial=-1)) + 1)
    low = (np.cumsum(shards_of) - shards_of)[document]
    count = shards_of[document]
    # If a document has several shards, both ends of the range are searched. For the search, a document and a position
    # become one number, document * span + position.
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
    """The query rows of one nano-batch, the k,v rows that these queries see, and the homes of all these rows.

    Attributes:
        ranks: R; each rank may compute attention.
        first: [D] position of each document's first query row in this nano-batch.
        last: [D] one past the last query row; ``first == last`` for a document without query rows here.
        q: shards of the query rows [first, last) of every document.
        kv: shards of the k,v rows [0, last) of every document with query rows here. After :meth:`within`, documents may
            lack their first rows. A rank's k,v tensor has the carried rows first, then the k,v rows of its query rows.
        q_rows: [R] number of query rows of each rank.
        carried_rows: [R] number of carried rows of each rank.
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
        return self.carried_rows + self.q_rows

    @property
    def tokens(self) -> int:
        return int(self.q_rows.sum())

    @property
    def carried(self) -> np.ndarray:
        """Returns [S] bool, whether each shard of ``kv`` is carried."""
        return np.asarray(self.kv.row < self.carried_rows[self.kv.rank])

    def of_first(self, ranks: int) -> Layout:
        """Returns the layout over the first ``ranks`` ranks. Later ranks must hold no rows."""
        assert not self.kv_rows[ranks:].any(), "a rank that is left out holds rows"
        return replace(self, ranks=ranks, q_rows=self.q_rows[:ranks], carried_rows=self.carried_rows[:ranks])

    def within(self, window: int) -> Layout:
        """Returns the layout without the carried rows that no query sees.

        ``window`` is the number of keys that a query sees; 0 for all keys."""
        # A document's first query sees the "window" - 1 rows before it. Earlier carried rows are left out. The carried
        # rows that stay are numbered from 0 in their old order, and the rank's other k,v rows follow.
        carried = self.carried
        if not window or not carried.any():
            return self
        kv = self.kv
        start = np.where(carried, np.maximum(kv.start, self.first[kv.document] - window + 1), kv.start)
        seen = start < kv.stop
        document, start, stop, rank, row = kv.document[seen], start[seen], kv.stop[seen], kv.rank[seen], kv.row[seen]
        carried, rows = carried[seen], stop - start
        carried_rows = np.bincount(rank[carried], rows[carried], self.ranks).astype(np.int64)
        row -= (self.carried_rows - carried_rows)[rank]
        some = np.flatnonzero(carried)
        some = some[order_by(rank[some], kv.row[seen][some])]
        row[some] = np.cumsum(rows[some]) - rows[some] - (np.cumsum(carried_rows) - carried_rows)[rank[some]]
        return replace(self, kv=Shards(document, start, stop, rank, row), carried_rows=carried_rows)

    def carried_from(self, previous: Layout | None, rank: int) -> list[tuple[int, int]]:
        """Returns the carried rows of ``rank`` as ranges (begin, end) of the previous nano-batch's query rows."""
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
