"""Deals documents to *ping* and *pong*, the two nano-batches of a micro-batch.

The transfers of one nano-batch run during the computation of the other, so both get about equally many tokens.
Documents are put in an order and laid end to end. The tokens before a *cut* are ping's, and the tokens behind it are
pong's. With the placement "spread", ``home_rows.py`` chooses the tokens of ping and pong instead.

Array legend: D documents, N ranges, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from distca.plan.sorting import merged

Dealing = Literal["in_order", "even", "lean"]
"""How documents are dealt to ping and pong. "in_order": ping gets the first documents. "even": both get about equal
attention work. "lean" differs from "even" only in the placement "spread" (``lay_out.py``)."""
_DEALT_ONE_BY_ONE = 64
""":func:`dealt_evenly` deals this many of the longest documents one by one, and shorter documents in turns. With 8
instead, attention on the slowest rank takes 0.1 % longer (``benchmarks/planner_constants.py``)."""
_SHORT_TAIL = 1 / 32
"""If a document has 3,200 rows before the cut and at most 100 behind it, the cut moves to the document's end. The cut
stays if ping's tokens would grow by more than this fraction."""


@dataclass(frozen=True)
class Stream:
    """Ranges of documents, in the order in which they are laid on ranks. Arrays are int64.

    Attributes:
        document: [N] index of each range's document.
        start: [N] the range's first position in the document.
        stop: [N] one past the range's last position.
    """

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def laid_end_to_end(ranges: Stream, room: np.ndarray) -> tuple[Stream, np.ndarray]:
    """Lays ranges end to end over ranks that have room for ``room`` [R] tokens, and cuts ranges where a rank is full.

    Returns the cut ranges, and the rank of each. Example: ranges have 3 and 4 tokens, and ranks have room for 5 and 2.
    Rank 0 gets ranges of 3 and 2 tokens, and rank 1 gets a range of 2 tokens."""
    # All tokens are on one line. Ranges end at "ends", ranks are full at "tops", and cut ranges begin at "cuts".
    ends, tops = np.cumsum(ranges.stop - ranges.start), np.cumsum(room)
    begins = ends - (ranges.stop - ranges.start)
    cuts = merged(begins, tops[tops < (ends[-1] if len(ends) else 0)])
    uppers = np.append(cuts[1:], ends[-1:])
    at = np.searchsorted(ends, cuts, side="right")
    start = ranges.start[at] + cuts - begins[at]
    rank = np.searchsorted(tops, cuts, side="right")
    return Stream(ranges.document[at], start, start + uppers - cuts), rank


def _deal(length: np.ndarray, documents: np.ndarray, cut: int) -> tuple[Stream, Stream]:
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
    """Returns the token at which to cut ``documents``, laid end to end: usually ``cut`` itself.

    If a document has only few rows behind ``cut``, the cut moves to the document's end, rounded up to a multiple of
    ``unit``. If the cut did not move, a rank would need all the document's keys and values for few queries in pong."""
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
    """Returns the ranges of each nano-batch. Of two nano-batches, ping has the first ``cut`` tokens."""
    if nano_batches == 1:
        return [Stream(documents, np.zeros(len(documents), np.int64), length[documents])]
    return list(_deal(length, documents, cut))


def dealt_evenly(length: np.ndarray, documents: np.ndarray, ping_first: bool) -> np.ndarray:
    """Returns ``documents`` in an order in which the first half of the tokens has about half of the attention work.

    The longest documents go one by one to the nano-batch with less work so far. Shorter documents go in turns to ping,
    pong, pong and ping. Ping's documents come first, then pong's. The shortest documents of both are in the middle.

    Args:
        length: [D] tokens of all documents.
        documents: indices of the documents to order.
        ping_first: whether ping gets the longest document.
    """
    # "ahead" is ping's work minus pong's. A document's work is its tokens squared.
    ranking = documents[np.argsort(-length[documents], kind="stable")]
    in_ping = (np.arange(len(ranking)) + 1) // 2 % 2 == 0
    ahead = 0.0 if ping_first else 1.0
    for i, own in enumerate(length[ranking[:_DEALT_ONE_BY_ONE]].tolist()):
        in_ping[i] = ahead <= 0
        ahead += float(own) ** 2 if in_ping[i] else -(float(own) ** 2)
    ping, pong = ranking[in_ping], ranking[~in_ping]
    difference = abs(int(length[ping].sum()) - int(length[pong].sum()))

    # The cut is at most "difference" tokens away from the border between ping's and pong's documents. Each side has its
    # shortest documents next to the border, with at least "difference" tokens. So the cut is among short documents.
    def near_cut(nano: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shortest = nano[::-1]
        count = int(np.searchsorted(np.cumsum(length[shortest]), difference)) + 1
        return np.sort(shortest[count:]), shortest[:count]

    (ping, ping_short), (pong, pong_short) = near_cut(ping), near_cut(pong)
    return np.concatenate((ping, ping_short[::-1], pong_short, pong))
