"""From documents on ranks to the rows of every nano-batch: what is computed in ping, what in pong, and what fills up.

A rank that has all of its documents in both halves moves nothing: the first rows of a document are computed in ping,
the others in pong, whose queries find the keys of the first ones at home. So both halves are made of one placement.
Every rank puts about the same part of its work into ping: whole documents where that comes out, and one that is cut.
Ranks may be full of documents so long that half their rows are a head with little work. Then ping has less work than
pong, on all ranks alike. A document in shares is cut at the same place for all of them.

Array legend: D documents, R ranks, N ranges. All arrays of rows are int64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.plan.place.halves import Stream
from distca.plan.place.head_cuts import Ranges, bounds_in_half, cut_whole, ranges_of_shares
from distca.plan.place.shares import Dealt, Work
from distca.plan.sorting import merged

_HEAD = 0.5
"""Part of the rows that is for ping of documents that are in parts only because no rank had room for all of it."""


def home_rows(
    length: np.ndarray, dealt: Dealt, budgets: Sequence[np.ndarray], work: Work, node: np.ndarray
) -> list[tuple[Stream, np.ndarray]] | None:
    """The ranges of every nano-batch and the rank of each, so that all budgets are met exactly.

    Args:
        length: [D] tokens.
        dealt: documents on ranks.
        budgets: by nano-batch, [R] tokens.
        work: of query ranges.
        node: [R] node of every rank.

    Returns:
        None where documents in shares are more than a half has room for.
    """
    shares = dealt.shares
    whole = (shares.low == 0) & (shares.high == 1)
    cut = length.copy()
    if len(budgets) == 2:
        # Parts of other documents are where tokens fit, however many rows pong has for shares.
        cut = np.rint(length * np.where(dealt.long, dealt.halves.head, _HEAD)).astype(np.int64)
        cut_whole(length, dealt, budgets, cut, whole, work)
    keys = np.bincount(shares.rank, length[shares.document], len(node))
    found = []
    in_ping = 0
    for half, budget in enumerate(budgets):
        low, high = (np.zeros_like(cut), cut) if half == 0 else (cut, length)
        begin, end = bounds_in_half(half, shares.low, shares.high)
        placed = [ranges_of_shares(shares.document, shares.rank, begin, end, low, high)]
        placed[0], cut_off = _within(placed[0], budget)
        room = budget - np.bincount(placed[0][3], placed[0][2] - placed[0][1], len(budget)).astype(np.int64)
        left, nobody, begin, end = _columns(dealt.left)
        begin, end = bounds_in_half(half, begin, end)
        beside, cut_off = _beside(cut_off, room, keys, node)
        placed.append(beside)
        missed = [ranges_of_shares(left, nobody, begin, end, low, high)[:3], cut_off[:3]]
        fixed = tuple(np.concatenate(column) for column in zip(*missed, strict=True))
        short = dealt.short
        spare = int(room.sum()) - int((fixed[2] - fixed[1]).sum())
        own = length[short]
        if half == 0:
            if spare < 0 or spare > own.sum():
                return None
            # The first of the short documents, one of them cut.
            stop = np.clip(spare - (np.cumsum(own) - own), 0, own)
            start, in_ping = np.zeros_like(stop), spare
        else:
            start, stop = np.clip(in_ping - (np.cumsum(own) - own), 0, own), own
        some = stop > start
        filler = (short[some], start[some], stop[some])
        document, start, stop = (np.concatenate(pair) for pair in zip(fixed, filler, strict=True))
        placed.append(_laid(document, start, stop, room))
        document, start, stop, rank = (np.concatenate(column) for column in zip(*placed, strict=True))
        found.append((Stream(document, start, stop), rank))
    return found


def _columns(left: list[tuple[int, float, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    document, low, high = zip(*left, strict=True) if left else ((), (), ())
    none = np.zeros(len(document), np.int64)
    return np.array(document, np.int64), none, np.array(low, np.float64), np.array(high, np.float64)


def _within(ranges: Ranges, budget: np.ndarray) -> tuple[Ranges, Ranges]:
    """Ranges that keep to the [R] budgets, and what had to be cut off."""
    document, start, stop, rank = ranges
    over = np.bincount(rank, stop - start, len(budget)).astype(np.int64) - budget
    if (over <= 0).all():
        nothing = np.zeros(0, np.int64)
        return ranges, (nothing, nothing, nothing, nothing)
    order = np.lexsort((start - stop, rank))
    cut = np.zeros_like(start)
    for at in order[over[rank[order]] > 0].tolist():
        cut[at] = min(over[rank[at]], stop[at] - start[at])
        over[rank[at]] -= cut[at]
    kept, lost = cut < stop - start, cut > 0
    return (
        (document[kept], start[kept], (stop - cut)[kept], rank[kept]),
        (document[lost], (stop - cut)[lost], stop[lost], rank[lost]),
    )


def _beside(ranges: Ranges, room: np.ndarray, keys: np.ndarray, node: np.ndarray) -> tuple[Ranges, Ranges]:
    """Put ranges that were cut off on other ranks, the longest first; returns these, and the ranges that fit nowhere.

    A range goes to a rank of its own node that has enough tokens left in the [R] ``room``: the one that reads fewest of
    the [R] ``keys``. Where there is none, it goes to the rank of any node with most room. Its tokens are taken off the
    room, and its keys are added."""
    document, start, stop, rank = ranges
    rows, target = stop - start, np.full(len(rank), -1)
    for at in np.argsort(-rows, kind="stable").tolist():
        near = np.flatnonzero((node == node[rank[at]]) & (room >= rows[at]))
        best = near[keys[near].argmin()] if len(near) else room.argmax()
        if room[best] >= rows[at]:
            room[best] -= rows[at]
            keys[best] += stop[at]
            target[at] = best
    some = target >= 0
    return (
        (document[some], start[some], stop[some], target[some]),
        (document[~some], start[~some], stop[~some], rank[~some]),
    )


def _laid(document: np.ndarray, start: np.ndarray, stop: np.ndarray, room: np.ndarray) -> Ranges:
    """Lay ranges end to end into [R] tokens of room, which they fill exactly, cut where a rank's room ends."""
    ends, tops = np.cumsum(stop - start), np.cumsum(room)
    begins = ends - (stop - start)
    cuts = merged(begins, tops[tops < (ends[-1] if len(ends) else 0)])
    uppers = np.append(cuts[1:], ends[-1:])
    at = np.searchsorted(ends, cuts, side="right")
    first = start[at] + cuts - begins[at]
    return document[at], first, first + uppers - cuts, np.searchsorted(tops, cuts, side="right")
