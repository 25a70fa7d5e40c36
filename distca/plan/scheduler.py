"""The scheduler: which server computes which CA-task, so that every server is done at about the same time.

Like the paper's greedy (arXiv 2510.18121, section 5.2) it starts with every shard at home and moves work from loaded to
idle servers by best time per byte. It differs in that only a server above its limit gives work away, and never more than
its excess, so that the makespan itself is bounded; see docs/planning.md.

Array legend: K directions (forward, backward, or both), R ranks, C receivers looked at, P pieces of one giving server.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from distca.plan.cost import CostModel, Direction
from distca.plan.errors import PlanError
from distca.plan.layout import Layout
from distca.plan.links import Links
from distca.plan.moves import Pieces, Sizer, worth
from distca.plan.plan import Plan
from distca.plan.pool import Pool

logger = logging.getLogger(__name__)

DEFAULT_TOLERANCE = 0.02
"""How far above the mean the slowest server may be; docs/planning.md shows the trade-off curve it was chosen from."""


def schedule(
    layout: Layout,
    cost: CostModel,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    direction: Direction = "both",
    resend: bool = False,
    links: Links | None = None,
    speeds: Sequence[float] | np.ndarray | None = None,
    max_received_bytes: int | None = None,
) -> Plan:
    """Plan one nano-batch.

    Args:
        layout: where the rows live.
        cost: seconds per CA-task.
        tolerance: no server may be more than this fraction above its fair share of the time, where the documents, the
            shortest worthwhile shards and the memory cap allow it.
        direction: balance the forward, the backward, or each of them with one common set of tasks.
        resend: whether backward resends q, k, v, o (changes what a moved row costs).
        links: prices of bytes between ranks; None prices all pairs alike.
        speeds: [R] relative speed of every server; None means all equal. A server of speed 0 computes nothing.
        max_received_bytes: most bytes of q, k and v rows one server may receive from other ranks for this nano-batch.

    Returns:
        A plan that computes every query row once; the same for the same arguments.

    Raises:
        PlanError: on a negative tolerance, unusable speeds, or a memory cap that even the plan at home exceeds.
    """
    if not tolerance >= 0:
        raise PlanError(f"tolerance is {tolerance}; it must be 0 or more.")
    links = links or Links()
    pool = Pool(
        layout, cost, direction, tolerance=tolerance, speeds=speeds, links=links, max_received_bytes=max_received_bytes
    )
    q_bytes, kv_bytes = cost.shape.moved_bytes(direction, resend)
    _balance(pool, Sizer(cost, direction, (q_bytes + kv_bytes / 2) / kv_bytes), q_bytes, kv_bytes)
    return Plan(layout, pool.tasks())


def _balance(pool: Pool, sizer: Sizer, q_bytes: int, kv_bytes: int) -> None:
    """Move work until no server is above its limit, or none of those that are can give any away."""
    scale = np.maximum(pool.mean, 1e-300)
    stuck = np.zeros(pool.layout.ranks, bool)
    while True:
        excess = ((pool.load - pool.limit) / scale[:, None]).max(axis=0)
        excess[stuck] = 0.0
        giver = int(pool.order[np.argmax(excess[pool.order])])
        if excess[giver] <= 1e-9:
            break
        stuck[giver] = not _give(pool, giver, sizer, scale, q_bytes, kv_bytes)
    if stuck.any():
        logger.debug("%d of %d servers stay above the tolerance: nothing left to move pays.", stuck.sum(), len(stuck))


def _give(pool: Pool, giver: int, sizer: Sizer, scale: np.ndarray, q_bytes: int, kv_bytes: int) -> bool:
    """Make the best move away from ``giver``; False when there is none."""
    room = pool.limit - pool.load
    need = -room[:, giver]
    receivers = _receivers(pool, giver, (room / scale[:, None]).min(axis=0), float((need / scale).max()))
    pieces = pool.pieces_of(giver)
    if not len(receivers) or not len(pieces.document):
        return False
    room = room[:, receivers]
    ranges = sizer.ranges(pieces, need, room)
    useful = worth(ranges, need, room, scale)
    rows = ranges.stop - ranges.start
    inside, across = pool.arriving(receivers, pieces, ranges)
    received = rows * pool.shape.q_bytes + (inside + across) * pool.shape.kv_bytes
    if pool.cap is not None:
        useful[pool.received[receivers][:, None] + received > pool.cap] = 0.0
    network = pool.links.network_price
    away = (pool.node[receivers] != pool.node[giver])[:, None]
    price = kv_bytes * (inside + network * across) + q_bytes * rows * np.where(away, network, 1.0)
    score = np.where(useful > 0, price / np.maximum(useful, 1e-300), np.inf)
    best = np.unravel_index(int(np.argmin(score)), score.shape)
    if not np.isfinite(score[best]):
        return False
    placement, chosen, piece = (int(x) for x in best)
    taken = _with_more_whole_pieces(piece, score[:, chosen], rows[:, chosen], pieces, need, room[:, chosen])
    if pool.cap is not None:
        spare = pool.cap - pool.received[receivers[chosen]]
        taken = taken[: max(1, int(np.searchsorted(np.cumsum(received[placement, chosen, taken]), spare, side="right")))]
    at = (placement, chosen, taken)
    parts = ranges.parts[:, :, placement, chosen, taken]
    pool.move(giver, int(receivers[chosen]), taken, ranges.start[at], ranges.stop[at], parts, int(received[at].sum()))
    return True


def _with_more_whole_pieces(
    best: int, score: np.ndarray, rows: np.ndarray, pieces: Pieces, need: np.ndarray, room: np.ndarray
) -> np.ndarray:
    """The best piece and, where it moves whole, the further whole pieces that come next and fit: many short documents
    move in one step. ``score`` and ``rows`` are [3, P] for one receiver, ``need`` and ``room`` [K]."""
    length = pieces.stop - pieces.start
    whole = (rows[0] == length) & np.isfinite(score[0])
    if not whole[best]:
        return np.array([best])
    cut = np.where(rows != length, score, np.inf).min()
    order = np.argsort(score[0], kind="stable")
    order = order[whole[order] & (score[0, order] <= cut) & (order != best)]
    order = np.concatenate(([best], order))
    total = np.cumsum(pieces.seconds[:, order], axis=1)
    fits = (total <= room[:, None]).all(axis=0)
    still_needed = ((total - pieces.seconds[:, order]) < need[:, None]).any(axis=0)
    return order[: max(1, int((fits & still_needed).sum()))]


def _receivers(pool: Pool, giver: int, free: np.ndarray, need: float) -> np.ndarray:
    """[C] ranks worth looking at: the emptiest, the fullest that can take all, the emptiest of the giver's node, and those
    that already read the giver's documents. ``free`` is [R], in mean loads."""
    room = free[pool.order]
    picks = [int(np.argmax(room))]
    fits = np.flatnonzero(room >= need)
    if len(fits):
        picks.append(int(fits[np.argmin(room[fits])]))
    if pool.links.ranks_per_node:
        near = np.flatnonzero((pool.node[pool.order] == pool.node[giver]) & (pool.order != giver))
        if len(near):
            picks.append(int(near[np.argmax(room[near])]))
    ranks = [int(pool.order[i]) for i in picks]
    sharers = [rank for document in pool.shared_documents.get(giver, ()) for rank in pool.homes[document]]
    ranks += sorted((rank for rank in sharers if free[rank] > 0.01), key=lambda rank: -free[rank])[:2]
    return np.array([rank for rank in dict.fromkeys(ranks) if rank != giver and free[rank] > 1e-6], np.int64)
