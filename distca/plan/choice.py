"""Chooses the cheaper of two placements of a micro-batch's documents on ranks.

A micro-batch is computed in two parts, the *nano-batches*. The transfers of one nano-batch run during the computation
of the other. A *row* is one token's q, or its k and v. The *home* of a row is the rank that computes the token's linear
layers. A *server* is a rank that computes attention.

- If both nano-batches are placed *together* (``place/shares.py``), ranks send about equally many rows. But more
  documents have rows in both nano-batches, and the keys of such documents are read twice.
- If nano-batches are placed *apart*, each by itself (``place/by_nano_batch.py``), fewer keys are read twice.

Array legend: R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distca.plan.cost.model import CostModel, Direction
from distca.plan.layout import Layout
from distca.plan.metrics import Traffic, server_seconds, traffic
from distca.plan.network import Links
from distca.plan.plan import Plan

_WORTH = 0.01
"""The least fraction of the time that placing together must save; with less, nano-batches are placed apart. Otherwise a
tiny gain would cost precision: the gradient of a k,v row that both nano-batches read is rounded twice. Values from 0 to
0.05 give about equal plans (benchmarks/results/planner.md)."""

_FEWER_PIECES = 0.02
"""The fraction by which attention and exposed transfers may take longer if recurrent layers get fewer pieces of
documents. With a shortened Qwen3.5-9B on two H200s, steps then took 1 to 2 % less time. Attention is 6 to 22 % of these
steps (benchmarks/results/hybrid_whole_documents_2_gpus.json)."""


class Scheduler(Protocol):
    """A function that plans one nano-batch: it chooses the server of each query row."""

    def __call__(self, layout: Layout, direction: Direction, beside: np.ndarray | None = None) -> Plan:
        """Returns the plan of ``layout``, over all ranks.

        Args:
            layout: the homes of the nano-batch's rows.
            direction: the direction whose attention seconds are balanced over servers, or both.
            beside: [R] seconds of other work that servers do at the same time.
        """
        ...


@dataclass(frozen=True)
class Price:
    """The price of one layer's plans, in forward and backward together.

    Attributes:
        attention: seconds of the slowest server, summed over nano-batches.
        exposed: seconds that ranks wait for transfers, summed over nano-batches. Example: a nano-batch's transfers take
            5 ms, and the other nano-batch's attention takes 3 ms. Then ranks wait 2 ms.
        bytes: bytes that travel between ranks.
    """

    attention: float
    exposed: float
    bytes: int

    def beats(self, other: Price) -> bool:
        """Returns whether this price of placing together beats the ``other`` price, of placing apart.

        There are two cases. In the first, no row travels if placed together, and attention takes no longer. In the
        second, ranks wait for transfers if placed apart; placing together saves time (``_WORTH``) and moves no more
        bytes."""
        if not self.bytes and self.attention <= other.attention:
            return True
        gains = self.attention + self.exposed < (other.attention + other.exposed) * (1 - _WORTH)
        return other.exposed > 0 and gains and self.bytes <= other.bytes

    def is_worth_fewer_pieces(self, other: Price) -> bool:
        """Returns whether this price, of a placement that cuts few documents, is low enough (``_FEWER_PIECES``).

        The ``other`` price is that of a placement by work."""
        return self.attention + self.exposed <= (other.attention + other.exposed) * (1 + _FEWER_PIECES)


NanoPlans = Sequence[tuple[Plan, Plan]]
"""The forward and the backward plan of every nano-batch."""


def once(scheduler: Scheduler) -> Scheduler:
    """Returns a scheduler that plans each layout and direction once. With ``beside`` it always plans anew."""
    found: dict[tuple[Layout, Direction], Plan] = {}

    def planned(layout: Layout, direction: Direction, beside: np.ndarray | None = None) -> Plan:
        if beside is not None:
            return scheduler(layout, direction, beside)
        key = (layout, direction)
        if key not in found:
            found[key] = scheduler(layout, direction)
        return found[key]

    return planned


def cheaper(
    by_nano_batch: Callable[[], tuple[Layout, ...]],
    together: Callable[[], tuple[Layout, ...]],
    price: Callable[[tuple[Layout, ...]], Price],
    whole: bool,
) -> tuple[Layout, ...]:
    """Returns the layouts of the cheaper placement.

    Args:
        by_nano_batch: places nano-batches apart.
        together: places nano-batches together.
        price: returns the price of the plans of all nano-batches' layouts.
        whole: whether every document has little enough work for one rank. If True, ``together`` is tried even if ranks
            wait for no transfer.
    """
    apart = by_nano_batch()
    before = price(apart)
    if not before.bytes or not (before.exposed or whole):
        return apart
    both = together()
    after = price(both)
    return both if after.beats(before) else apart


def price_of(nanos: NanoPlans, cost: CostModel, links: Links, resend: bool) -> Price:
    """Returns the price of one layer of a micro-batch.

    Args:
        nanos: the plans of each nano-batch.
        cost: seconds per task, and bytes of rows.
        links: which ranks share a node, and the speeds of transfers.
        resend: whether homes send rows again for backward.
    """
    attention, exposed, moved, shape = 0.0, 0.0, 0, cost.shape
    # Forward and backward often have the same plan, so each plan's traffic is remembered.
    rows_of: dict[Plan, Traffic] = {}
    q, o = shape.q_bytes, shape.o_bytes
    # For each direction: the bytes of a query row to the server, and the bytes that return home. Backward sends dO, or
    # q, o and dO if homes resend. dQ returns, and is as large as q.
    directions: tuple[tuple[Direction, int, int], ...] = (
        ("forward", q, o),
        ("backward", q + 2 * o if resend else o, q),
    )
    for way, (direction, out, back) in enumerate(directions):
        plans = [nano[way] for nano in nanos]
        slowest = [float(server_seconds(plan, cost, direction).max()) for plan in plans]
        attention += sum(slowest)
        q_bytes, kv_bytes = shape.moved_bytes(direction, resend)
        for own, plan in zip(slowest, plans, strict=True):
            if plan not in rows_of:
                rows_of[plan] = traffic(plan, links)
            rows, node = rows_of[plan], links.nodes(plan.layout.ranks)
            moved += rows.q_rows * q_bytes + rows.kv_rows * kv_bytes
            one_way = (out, back, shape.kv_bytes)
            far = rows.between(node).busiest(*one_way)
            # A byte inside a node takes 1 / bytes_per_s, and a byte between nodes network_price times as long.
            travel = (rows.busiest(*one_way) + (links.network_price - 1) * far) / links.bytes_per_s(far=False)
            exposed += max(float(travel.max()) - (sum(slowest) - own), 0.0)
    return Price(attention, exposed, moved)
