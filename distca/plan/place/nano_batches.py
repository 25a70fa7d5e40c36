"""Dealing documents to the two nano-batches of a micro-batch, ping and pong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from distca.plan.sorting import merged

Dealing = Literal["in_order", "even", "lean"]
_DEALT_ONE_BY_ONE = 64
"""Documents that are dealt one by one, the longest. Shorter ones are dealt in turns, which levels them without a look
at each. With 8 the slowest server is 0.1 % slower (benchmarks/results/planner.md)."""
_SHORT_TAIL = 1 / 32
"""The part of a document's head below which its tail counts as short and joins the head in ping. It is also the part of
its tokens by which ping may get longer for that."""


@dataclass(frozen=True)
class Stream:
    """Ranges of documents in the order in which they are placed on ranks. Array legend: N ranges; arrays are int64.

    Attributes:
        document: [N] document of each range.
        start: [N] first row.
        stop: [N] one past the last row.
    """

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def laid_end_to_end(ranges: Stream, room: np.ndarray) -> tuple[Stream, np.ndarray]:
    """Lays ranges end to end into [R] tokens of room, cut where a rank's room ends; returns the pieces and their ranks.

    Example: ranges of 3 and 4 rows in room for 5 and 2: rank 0 gets 3 and 2 rows, rank 1 the last 2."""
    # On one line of tokens, "ends" and "tops" are where ranges and ranks end. Every piece begins at one of both.
    ends, tops = np.cumsum(ranges.stop - ranges.start), np.cumsum(room)
    begins = ends - (ranges.stop - ranges.start)
    cuts = merged(begins, tops[tops < (ends[-1] if len(ends) else 0)])
    uppers = np.append(cuts[1:], ends[-1:])
    at = np.searchsorted(ends, cuts, side="right")
    start = ranges.start[at] + cuts - begins[at]
    rank = np.searchsorted(tops, cuts, side="right")
    return Stream(ranges.document[at], start, start + uppers - cuts), rank


def _deal(length: np.ndarray, documents: np.ndarray, cut: int) -> tuple[Stream, Stream]:
    """Cuts the stream of ``documents`` after ``cut`` tokens; the document at the cut is split in two."""
    own = length[documents]
    ends = np.cumsum(own)
    in_ping = np.clip(cut - (ends - own), 0, own)
    ping = in_ping > 0
    pong = in_ping < own
    return (
        Stream(documents[ping], np.zeros(int(ping.sum()), np.int64), in_ping[ping]),
        Stream(documents[pong], in_ping[pong], own[pong]),
    )


def without_short_tail(length: np.ndarray, documents: np.ndarray, cut: int, unit: int = 1) -> int:
    """Returns the token at which to cut the stream of ``documents``: ``cut``, or the end of the document there.

    It is the document's end, rounded up to a multiple of ``unit``, if only a short tail would be left of it. Whoever
    computes a tail needs the keys and values of the whole document once more, even for a single token. Contexts that
    are powers of two make such tails usual: ping is a few tokens shorter than two full documents.
    """
    ends = np.cumsum(length[documents])
    at = int(np.searchsorted(ends, cut))
    if at == len(ends):
        return cut
    tail = int(ends[at]) - cut
    head = int(length[documents[at]]) - tail
    moved = min(-(-int(ends[at]) // unit) * unit, int(ends[-1]))
    if not 0 < tail <= _SHORT_TAIL * head or moved - cut > _SHORT_TAIL * cut:
        return cut
    return moved


def streams_of(length: np.ndarray, documents: np.ndarray, nano_batches: int, cut: int) -> list[Stream]:
    """Returns the stream of ``documents`` for each nano-batch; with two, ping's has the first ``cut`` tokens."""
    if nano_batches == 1:
        return [Stream(documents, np.zeros(len(documents), np.int64), length[documents])]
    return list(_deal(length, documents, cut))


def dealt_evenly(length: np.ndarray, documents: np.ndarray, ping_first: bool) -> np.ndarray:
    """``documents`` reordered so that cutting the stream in the middle leaves about equal work on both sides.

    The longest ones go one by one to the nano-batch with less work, the many short ones to ping, pong, pong, ping, ...
    Inside a nano-batch documents keep their order, but the shortest stand next to the cut. It moves through these to
    even out tokens, so that only a short document is cut.
    """
    # In ping or not, by rank of length; "ahead" is the work, as rows squared, that ping has more than pong.
    ranking = documents[np.argsort(-length[documents], kind="stable")]
    in_ping = (np.arange(len(ranking)) + 1) // 2 % 2 == 0
    ahead = 0.0 if ping_first else 1.0
    for i, own in enumerate(length[ranking[:_DEALT_ONE_BY_ONE]].tolist()):
        in_ping[i] = ahead <= 0
        ahead += float(own) ** 2 if in_ping[i] else -(float(own) ** 2)
    ping, pong = ranking[in_ping], ranking[~in_ping]
    surplus = abs(int(length[ping].sum()) - int(length[pong].sum()))

    def near_cut(nano: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shortest = nano[::-1]
        count = int(np.searchsorted(np.cumsum(length[shortest]), surplus)) + 1
        return np.sort(shortest[count:]), shortest[:count]  # the cut may move over the second

    (ping, ping_short), (pong, pong_short) = near_cut(ping), near_cut(pong)
    return np.concatenate((ping, ping_short[::-1], pong_short, pong))
