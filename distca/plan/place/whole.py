"""Places a micro-batch's documents on ranks so that few documents lie on several ranks.

On one node, ``distca/plan/step.py`` considers this placement for recurrent layers (linear attention, SSM). For a
document on several ranks, these layers run more kernels, and ranks send each other recurrent states.

The ``_ONE_BY_ONE`` longest documents are given to ranks whole, the longest first. Each goes to the rank with the least
attention work so far, among the ranks with room for the document. All other documents, and those for which no rank has
room, fill the remaining room one after the other. A document is cut where the room of a rank ends.

Array legend: D documents, R ranks, N pieces of cut documents. Arrays are int64, ``work`` may be float64.
"""

from __future__ import annotations

import heapq

import numpy as np

from distca.plan.place.nano_batches import Stream, laid_end_to_end

_ONE_BY_ONE = 2048
"""The most documents that are given to ranks one by one, in a Python loop. A larger number may cut fewer documents, and
makes planning slower."""


def whole_documents(length: np.ndarray, room: np.ndarray, work: np.ndarray) -> tuple[np.ndarray, Stream, np.ndarray]:
    """Gives documents to ranks.

    Args:
        length: [D] tokens.
        room: [R] tokens of each rank; they add up to the tokens of all documents.
        work: [D] attention work of each document, in any unit.

    Returns:
        [D] rank of each document, -1 for cut documents; the pieces of cut documents; and the [N] rank of each piece.

    Example: documents of 6, 3 and 3 tokens on two ranks of 6 tokens stay whole. Of documents of 4, 4 and 4 tokens the
    third is cut, and both ranks get 2 tokens of it.
    """
    rank_of = np.full(len(length), -1, np.int64)
    left: list[int] = room.tolist()
    least: list[tuple[float, int]] = [(0.0, at) for at in range(len(left))]  # a heap of (work, rank)
    for document in np.argsort(-length, kind="stable")[:_ONE_BY_ONE].tolist():
        own, full = int(length[document]), []
        while least and left[least[0][1]] < own:
            full.append(heapq.heappop(least))
        if least:
            done, rank = least[0]
            heapq.heapreplace(least, (done + float(work[document]), rank))
            left[rank] -= own
            rank_of[document] = rank
        for each in full:
            heapq.heappush(least, each)
    others = np.flatnonzero(rank_of < 0)
    laid, at = laid_end_to_end(Stream(others, np.zeros_like(others), length[others]), np.array(left, np.int64))
    whole = laid.stop - laid.start == length[laid.document]
    rank_of[laid.document[whole]] = at[whole]
    rest = Stream(laid.document[~whole], laid.start[~whole], laid.stop[~whole])
    return rank_of, rest, at[~whole]
