"""Deals documents to micro-batches, so that few documents must be cut over several ranks.

``distca/plan/step.py`` does this if documents may move to another micro-batch.

A document with clearly more attention work than a rank has on average in its micro-batch must be cut. In a micro-batch
with documents of similar length this is rare. So documents are dealt longest first, and one micro-batch is filled after
the other. Micro-batches may have unequal work, because the work of each is balanced over the ranks by itself. Shorter
documents may be cut too, where a rank or nano-batch is full.

With pipeline stages, the first and the last micro-batches get the longest documents: while they run, some stages have
no micro-batch and compute attention of other stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.errors import PlanError


def deal_over_micro_batches(
    lengths: Sequence[int] | np.ndarray, room: Sequence[int] | np.ndarray, stages: int = 1
) -> list[np.ndarray] | None:
    """Deals documents to micro-batches.

    Args:
        lengths: [documents] tokens per document, each at least 1.
        room: [micro-batches] the most tokens that each micro-batch may have.
        stages: number of pipeline stages.

    Returns:
        For each micro-batch, the ascending int64 indices of its documents. None if a document finds no micro-batch with
        enough room left.

    Raises:
        PlanError: a document has no tokens, room is below 0, or there is no micro-batch.
    """
    length = np.asarray(lengths, np.int64).reshape(-1)
    tokens = np.asarray(room, np.int64).reshape(-1)
    if not len(tokens) or tokens.min() < 0:
        raise PlanError(f"room is {tokens.tolist()}; give at least one micro-batch, each with 0 tokens or more.")
    if len(length) and length.min() < 1:
        raise PlanError(f"Document {int(length.argmin())} has {int(length.min())} tokens; it needs at least 1.")
    order = np.argsort(-length, kind="stable")
    turn = list(range(len(tokens)))
    if stages > 1:
        turn.sort(key=lambda number: min(number, len(tokens) - 1 - number))  # for example 0, 3, 1, 2
    left, dealt = tokens.tolist(), np.empty(len(length), np.int64)
    sizes = length[order]
    firsts = np.flatnonzero(np.append(True, sizes[1:] != sizes[:-1])[: len(sizes)])
    ends = np.append(firsts[1:], len(sizes))[: len(firsts)]
    # All documents of one size are dealt together: as many as fit into one micro-batch, then into the next.
    for size, begin, end in zip(sizes[firsts].tolist(), firsts.tolist(), ends.tolist(), strict=True):
        for at in turn:
            some = min(left[at] // size, end - begin)
            dealt[order[begin : begin + some]] = at
            left[at] -= some * size
            begin += some
            if begin == end:
                break
        else:
            return None
    return [np.flatnonzero(dealt == number) for number in range(len(tokens))]
