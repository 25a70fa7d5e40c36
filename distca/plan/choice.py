"""The choice between two placements of a small pool's micro-batch: the one whose plans cost less wins.

Placing ping and pong together (``place/shares.py``) levels what ranks send. Its price is that documents have rows in
both: there are more tasks, and keys are read twice. Where few ranks have fast links nobody waits for transfers, and
placing each nano-batch by itself (``place/by_nano_batch.py``) takes less time. So both are planned and priced.

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
"""The least part of the time that documents with rows in both nano-batches must save. Below it they are not worth it,
as the gradient of a carried row is rounded twice."""


class Scheduler(Protocol):
    """Plans one nano-batch of a phase."""

    def __call__(self, layout: Layout, direction: Direction, beside: np.ndarray | None = None) -> Plan:
        """The plan of ``layout``, over the whole pool.

        Args:
            layout: of the nano-batch.
            direction: what the plan is for.
            beside: [R] seconds of other work that servers have meanwhile, for stages with another kind of layer.
        """
        ...


@dataclass(frozen=True)
class Price:
    """The price of a layer's plans.

    Attributes:
        attention: seconds of the slowest server, added over nano-batches and directions.
        exposed: seconds of the busiest rank's transfers that the other nano-batch's attention does not hide.
        bytes: bytes that travel between ranks.
    """

    attention: float
    exposed: float
    bytes: int

    def beats(self, other: Price) -> bool:
        """Whether to place both together, at this price: no row travels then, or ranks wait less for transfers."""
        if not self.bytes and self.attention <= other.attention:
            return True
        gains = self.attention + self.exposed < (other.attention + other.exposed) * (1 - _WORTH)
        return other.exposed > 0 and gains and self.bytes <= other.bytes


NanoPlans = Sequence[tuple[Plan, Plan]]
"""The forward and the backward plan of every nano-batch."""


def once(scheduler: Scheduler) -> Scheduler:
    """Returns a scheduler that plans every layout once, however often it is asked for."""
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
    planned: Callable[[Layout], tuple[Plan, Plan]],
    price: Callable[[NanoPlans], Price],
    whole: bool,
) -> tuple[Layout, ...]:
    """The layouts that cost less: each nano-batch placed by itself, unless transfers would be waited for.

    Args:
        by_nano_batch: lays out each nano-batch by itself.
        together: lays out both together.
        planned: returns the forward and the backward plan of a layout.
        price: returns the price of all nano-batches' plans.
        whole: whether no document has more work than a rank, so that both together may move nothing.
    """
    apart = by_nano_batch()
    before = price([planned(layout) for layout in apart])
    if not before.bytes or not (before.exposed or whole):
        return apart
    both = together()
    after = price([planned(layout) for layout in both])
    return both if after.beats(before) else apart


def price_of(nanos: NanoPlans, cost: CostModel, links: Links, resend: bool) -> Price:
    """Returns the price of one layer of a micro-batch."""
    attention, exposed, moved, shape = 0.0, 0.0, 0, cost.shape
    # Traffic is counted once for a plan, as forward and backward often share one.
    rows_of: dict[Plan, Traffic] = {}
    q, o = shape.q_bytes, shape.o_bytes
    # For each direction, the bytes of a query row that go to the server, and those that come home.
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
            travel = (rows.busiest(*one_way) + (links.network_price - 1) * far) / links.bytes_per_s(far=False)
            exposed += max(float(travel.max()) - (sum(slowest) - own), 0.0)
    return Price(attention, exposed, moved)
