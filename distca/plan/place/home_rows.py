"""Chooses which rows of every document each rank has in each *nano-batch*: in *ping* and *pong*, or in a single one.

- A document's first rows, its *head*, are in ping, and its last rows, its *tail*, in pong. ``shares.py`` has dealt both
  to the same ranks. So ranks that need the head's keys in pong have read most of them in ping.
- A document on several ranks is in *shares*. A share has a range of rows and its mirror image in the head, and a range
  and its mirror image in the tail.
- *Filler* is the shortest documents. They fill the tokens that other documents leave free on each rank.

Example: a document of 8 rows is in two equal shares, and row 4 is its first row in pong. In ping, rank 0 has the outer
rows of the head, 0 and 3, and rank 1 has 1 and 2. In pong, rank 0 has the inner rows of the tail, 5 and 6, and rank 1
has 4 and 7.

Array legend: D documents, R ranks, N ranges.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.plan.place.head_cuts import Ranges, bounds_in_nano_batch, cut_whole, ranges_of_shares
from distca.plan.place.nano_batches import Stream, laid_end_to_end
from distca.plan.place.shares import Dealt, Work

_HEAD = 0.5
"""The fraction of a document's rows in ping, if the document is in shares because no rank had enough room left. If it
has too much work or too many tokens for any rank, ``shares.py`` chooses the fraction."""


def home_rows(
    length: np.ndarray, dealt: Dealt, budgets: Sequence[np.ndarray], work: Work, node: np.ndarray
) -> list[tuple[Stream, np.ndarray]] | None:
    """Returns the rows of every rank in every nano-batch, exactly as many as ``budgets`` say.

    Args:
        length: [D] tokens of each document.
        budgets: for each nano-batch, the [R] numbers of tokens that ranks get.
        work: gives the attention time of query ranges.
        node: [R] node of every rank.

    Returns:
        For each nano-batch, N ranges and the [N] int64 rank of each. None if rows in ping cannot add up to budgets.
    """
    shares = dealt.shares
    whole = (shares.low == 0) & (shares.high == 1)
    cut = length.copy()
    if len(budgets) == 2:
        cut = np.rint(length * np.where(dealt.long, dealt.split.head, _HEAD)).astype(np.int64)
        cut_whole(length, dealt, budgets, cut, whole, work)
    keys = np.bincount(shares.rank, length[shares.document], len(node))
    found = []
    in_ping = 0
    for nano, budget in enumerate(budgets):
        # This nano-batch has the rows [low, high) of all documents but filler. The rows of shares are placed first, and
        # rows beyond a rank's budget move to a rank with room. "fixed" are ranges for which no rank has room enough, or
        # that ``shares.py`` dealt to no rank. Fixed ranges and then filler are laid end to end, and cut where a rank's
        # room ends.
        low, high = (np.zeros_like(cut), cut) if nano == 0 else (cut, length)
        begin, end = bounds_in_nano_batch(nano, shares.low, shares.high)
        placed = [ranges_of_shares(shares.document, shares.rank, begin, end, low, high)]
        placed[0], cut_off = _within(placed[0], budget)
        room = budget - np.bincount(placed[0][3], placed[0][2] - placed[0][1], len(budget)).astype(np.int64)
        left, no_rank, begin, end = _columns(dealt.left)
        begin, end = bounds_in_nano_batch(nano, begin, end)
        beside, cut_off = _moved_to_room(cut_off, room, keys, node)
        placed.append(beside)
        missed = [ranges_of_shares(left, no_rank, begin, end, low, high)[:3], cut_off[:3]]
        fixed = tuple(np.concatenate(column) for column in zip(*missed, strict=True))
        short = dealt.short
        spare = int(room.sum()) - int((fixed[2] - fixed[1]).sum())
        own = length[short]
        if nano == 0:
            if spare < 0 or spare > own.sum():
                return None
            # Ping takes the first ``spare`` tokens of the filler.
            stop = np.clip(spare - (np.cumsum(own) - own), 0, own)
            start, in_ping = np.zeros_like(stop), spare
        else:
            start, stop = np.clip(in_ping - (np.cumsum(own) - own), 0, own), own
        some = stop > start
        filler = (short[some], start[some], stop[some])
        document, start, stop = (np.concatenate(pair) for pair in zip(fixed, filler, strict=True))
        pieces, owner = laid_end_to_end(Stream(document, start, stop), room)
        placed.append((pieces.document, pieces.start, pieces.stop, owner))
        document, start, stop, rank = (np.concatenate(column) for column in zip(*placed, strict=True))
        found.append((Stream(document, start, stop), rank))
    return found


def _columns(left: list[tuple[int, float, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the columns document, rank (zeros without a meaning), low and high of ``left``."""
    document, low, high = zip(*left, strict=True) if left else ((), (), ())
    none = np.zeros(len(document), np.int64)
    return np.array(document, np.int64), none, np.array(low, np.float64), np.array(high, np.float64)


def _within(ranges: Ranges, budget: np.ndarray) -> tuple[Ranges, Ranges]:
    """Cuts rows beyond the [R] budgets off the ends of ranks' longest ranges. Returns what stays, and what was cut."""
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


def _moved_to_room(ranges: Ranges, room: np.ndarray, keys: np.ndarray, node: np.ndarray) -> tuple[Ranges, Ranges]:
    """Moves ranges to other ranks, longest first. Returns the ranges that moved, and the ranges that fit nowhere.

    Of the ranks on the range's node with enough room, the one that reads fewest keys gets the range. If there is none,
    the rank with most room gets the range, if that room is enough. The function changes ``room`` [R], the tokens that
    ranks have free, and ``keys`` [R], about how many keys ranks read."""
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
