"""Dealing documents to the two halves of a micro-batch, ping and pong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Dealing = Literal["in_order", "even", "lean"]
_DEALT_ONE_BY_ONE = 64
_SHORT_TAIL = 1 / 32
"""A tail is short below this share of what comes before it. The first half may get longer by this share of its
tokens."""


@dataclass(frozen=True)
class Stream:
    """Ranges of documents in the order in which they are placed on ranks."""

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def _deal(length: np.ndarray, documents: np.ndarray, cut: int) -> tuple[Stream, Stream]:
    """Cut the stream of ``documents`` after ``cut`` tokens; the document at the cut is split."""
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
    """Returns the place at which to cut the stream of ``documents``. It is ``cut``. If little of the document there is
    left, it is the document's end, rounded up to a multiple of ``unit``.

    Whoever computes the tail of a document needs the keys and values of all of it once more, be the tail a single
    token. Contexts that are powers of two make such tails usual: a half is a few tokens shorter than two full
    documents.
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


def halves(length: np.ndarray, documents: np.ndarray, nano_batches: int, cut: int) -> list[Stream]:
    if nano_batches == 1:
        return [Stream(documents, np.zeros(len(documents), np.int64), length[documents])]
    return list(_deal(length, documents, cut))


def dealt_evenly(length: np.ndarray, documents: np.ndarray, ping_first: bool) -> np.ndarray:
    """``documents`` reordered so that cutting the stream in half leaves about equal work on both sides.

    The longest ones go one by one to the half with less work, the many short ones to ping, pong, pong, ping, ... Inside
    a half documents keep their order, except that those near the cut, where the halves' tokens are evened out, are the
    shortest ones.
    """
    ranking = documents[np.argsort(-length[documents], kind="stable")]
    in_ping = (np.arange(len(ranking)) + 1) // 2 % 2 == 0
    ahead = 0.0 if ping_first else 1.0
    for i, own in enumerate(length[ranking[:_DEALT_ONE_BY_ONE]].tolist()):
        in_ping[i] = ahead <= 0
        ahead += float(own) ** 2 if in_ping[i] else -(float(own) ** 2)
    ping, pong = ranking[in_ping], ranking[~in_ping]
    surplus = abs(int(length[ping].sum()) - int(length[pong].sum()))

    def near_cut(half: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shortest = half[::-1]
        count = int(np.searchsorted(np.cumsum(length[shortest]), surplus)) + 1
        return np.sort(shortest[count:]), shortest[:count]

    (ping, ping_short), (pong, pong_short) = near_cut(ping), near_cut(pong)
    return np.concatenate((ping, ping_short[::-1], pong_short, pong))
