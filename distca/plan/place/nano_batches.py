"""Deals documents to *ping* and *pong*, the two nano-batches of a micro-batch, before documents are placed on ranks.

Ping and pong get about equally many tokens, so that the transfers of one can run during the computation of the other.
The documents are put in an order and laid end to end. The tokens before a *cut* are ping's, and the tokens behind it
pong's. ``lay_out.py`` deals documents in this way unless it places ping and pong together.

Array legend: D documents, N ranges, R ranks. Constants were compared with other values:
``benchmarks/planner_constants.py``, benchmarks/results/planner.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from distca.plan.sorting import merged

Dealing = Literal["in_order", "even", "lean"]
"""How documents are dealt to ping and pong. "in_order": ping gets the first documents. "even" and "lean": documents are
dealt by length, for about equal work. "even" and "lean" differ only where ``lay_out.py`` places ping and pong
together."""
_DEALT_ONE_BY_ONE = 64
"""This many of the longest documents are dealt one by one, by their work. Shorter documents are dealt in turns, which
is faster. With 8 instead, the slowest server takes 0.1 % longer."""
_SHORT_TAIL = 1 / 32
"""A document's tail behind the cut moves to ping if it has at most this part of the head's rows. The cut moves by at
most this part of ping's tokens."""


@dataclass(frozen=True)
class Stream:
    """Ranges of documents, in the order in which ranks get the ranges. Arrays are int64.

    Attributes:
        document: [N] document of each range.
        start: [N] first row.
        stop: [N] one past the last row.
    """

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def laid_end_to_end(ranges: Stream, room: np.ndarray) -> tuple[Stream, np.ndarray]:
    """Lays ranges end to end over ranks with [R] tokens of ``room``, and cuts them where a rank's room ends.

    Returns the pieces of ranges, and the rank of each piece. Example: ranges have 3 and 4 rows, and ranks have room for
    5 and 2. Rank 0 gets pieces of 3 and 2 rows, and rank 1 a piece of 2 rows."""
    # All tokens are on one line. Ranges end at "ends", and the room of ranks ends at "tops". A piece begins at each
    # "cut": where a range begins, or where a rank's room ends.
    ends, tops = np.cumsum(ranges.stop - ranges.start), np.cumsum(room)
    begins = ends - (ranges.stop - ranges.start)
    cuts = merged(begins, tops[tops < (ends[-1] if len(ends) else 0)])
    uppers = np.append(cuts[1:], ends[-1:])
    at = np.searchsorted(ends, cuts, side="right")
    start = ranges.start[at] + cuts - begins[at]
    rank = np.searchsorted(tops, cuts, side="right")
    return Stream(ranges.document[at], start, start + uppers - cuts), rank


def _deal(length: np.ndarray, documents: np.ndarray, cut: int) -> tuple[Stream, Stream]:
    """Lays ``documents`` end to end; returns the ranges before the token ``cut``, and the ranges behind it."""
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
    """Returns the token at which to cut the line of ``documents``: usually ``cut`` itself.

    If only a short tail of a document lies behind ``cut``, the cut moves to the document's end, rounded up to a
    multiple of ``unit``. Otherwise a rank would need all keys and values of the document for a few queries."""
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
    """Returns the ranges of each nano-batch. Of two nano-batches, ping has the first ``cut`` tokens of ``documents``,
    laid end to end."""
    if nano_batches == 1:
        return [Stream(documents, np.zeros(len(documents), np.int64), length[documents])]
    return list(_deal(length, documents, cut))


def dealt_evenly(length: np.ndarray, documents: np.ndarray, ping_first: bool) -> np.ndarray:
    """Returns ``documents`` in an order whose first and second half have about equal attention work.

    The longest documents go one by one to the nano-batch with less work. Shorter documents go to ping, pong, pong,
    ping, and so on. Ping's documents come first, then pong's. The middle, where the line is cut into equal halves, has
    the shortest documents of ping and of pong. All other documents are in order of their indices.

    Args:
        length: [D] tokens of all documents.
        documents: indices of the documents to order.
        ping_first: whether ping gets the longest document.
    """
    # "ranking" has the longest documents first. "ahead" is ping's work minus pong's, where work is rows squared.
    ranking = documents[np.argsort(-length[documents], kind="stable")]
    in_ping = (np.arange(len(ranking)) + 1) // 2 % 2 == 0
    ahead = 0.0 if ping_first else 1.0
    for i, own in enumerate(length[ranking[:_DEALT_ONE_BY_ONE]].tolist()):
        in_ping[i] = ahead <= 0
        ahead += float(own) ** 2 if in_ping[i] else -(float(own) ** 2)
    ping, pong = ranking[in_ping], ranking[~in_ping]
    difference = abs(int(length[ping].sum()) - int(length[pong].sum()))

    # If ping and pong have unequal tokens, the middle is not where pong begins. So the shortest documents, with
    # "difference" tokens together or a little more, stand on either side of pong's begin.
    def near_cut(nano: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shortest = nano[::-1]
        count = int(np.searchsorted(np.cumsum(length[shortest]), difference)) + 1
        return np.sort(shortest[count:]), shortest[:count]

    (ping, ping_short), (pong, pong_short) = near_cut(ping), near_cut(pong)
    return np.concatenate((ping, ping_short[::-1], pong_short, pong))
