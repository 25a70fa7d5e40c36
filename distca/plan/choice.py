"""Compares placements of a micro-batch's documents on ranks, for ``step.py``.

A micro-batch is computed in one or two parts, the *nano-batches*. The transfers of one run during the computation of
the other. A *row* is one token's q, or its k and v. The *home* of a row is the rank that computes the token's linear
layers. A *server* is a rank that computes attention.

- *together* (``place/shares.py``): ranks get about equal attention work, summed over both nano-batches.
- *apart* (``place/by_nano_batch.py``): ranks get about equal attention work in each nano-batch. Fewer documents have
  rows in both nano-batches, so fewer keys are read twice.
- *whole* (``place/whole.py``): few documents are cut. It is considered only for models with recurrent layers.

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
from distca.plan.plan import Plan, plan_at_home

_WORTH = 0.01
"""If the placement "together" moves bytes, it must save this fraction of the time of the placement "apart". A smaller
gain is not worth the loss of precision: the gradient of a k,v row that both nano-batches read is rounded twice. Values
from 0 to 0.05 give about equal plans (benchmarks/results/planner_constants.json)."""

_FEWER_PIECES = 0.02
"""The placement "whole" is taken if it takes at most this fraction longer than the placement that would be taken
otherwise. Only attention and waiting for transfers are compared. With "whole", recurrent layers have fewer pieces of
documents to compute. In steps of a shortened Qwen3.5-9B on two H200s, attention takes only 6 to 26 % of the time
(benchmarks/results/hybrid_whole_documents_2_gpus.json)."""


class Scheduler(Protocol):
    """A function that chooses the server of each query row.

    One call plans one nano-batch, or with pipeline stages one nano-batch of each stage together."""

    def __call__(self, layout: Layout, direction: Direction, beside: np.ndarray | None = None) -> Plan:
        """Returns the plan of ``layout``, over all ranks.

        Args:
            layout: the rows to plan, and their homes.
            direction: whether to balance the attention seconds of forward, of backward or of both.
            beside: [R] seconds of servers' other work, which are balanced together with attention.
        """
        ...


@dataclass(frozen=True)
class Price:
    """The cost of one layer's plans, summed over forward and backward.

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
        """Returns whether "together", with this price, is better than "apart", with the ``other`` price.

        It is better if it moves no bytes and attention takes no longer. If ranks wait for transfers in "apart", it is
        also better if it saves time (``_WORTH``) and moves no more bytes."""
        if not self.bytes and self.attention <= other.attention:
            return True
        gains = self.attention + self.exposed < (other.attention + other.exposed) * (1 - _WORTH)
        return other.exposed > 0 and gains and self.bytes <= other.bytes

    def is_worth_fewer_pieces(self, other: Price) -> bool:
        """Returns whether to take the placement with this price, which cuts fewer documents than the ``other``."""
        return self.attention + self.exposed <= (other.attention + other.exposed) * (1 + _FEWER_PIECES)


NanoPlans = Sequence[tuple[Plan, Plan]]
"""The forward and the backward plan of every nano-batch."""


class Once:
    """A scheduler that remembers its plans, except those with ``beside``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._found: dict[tuple[Layout, Direction], Plan] = {}

    def __call__(self, layout: Layout, direction: Direction, beside: np.ndarray | None = None) -> Plan:
        if beside is not None:
            return self._scheduler(layout, direction, beside)
        key = (layout, direction)
        if key not in self._found:
            self._found[key] = self._scheduler(layout, direction)
        return self._found[key]

    def leave_at_home(self, layouts: Sequence[Layout]) -> None:
        """Sets the plans of these layouts: homes compute the attention of their own rows."""
        for layout in layouts:
            plan = plan_at_home(layout)
            self._found |= {(layout, "forward"): plan, (layout, "backward"): plan, (layout, "both"): plan}


def is_level_at_home(layouts: Sequence[Layout], cost: CostModel) -> bool:
    """Returns whether it is good enough that every home computes the attention of its own rows.

    It is if no row travels then, and the slowest rank takes at most ``_FEWER_PIECES`` longer than the mean, in forward
    and in backward. Without transfers no rank waits for another between nano-batches. So the seconds of a rank's
    nano-batches are added up before ranks are compared."""
    plans = [plan_at_home(layout) for layout in layouts]
    if any(rows.q_rows or rows.kv_rows for rows in map(traffic, plans)):
        return False
    ways: tuple[Direction, ...] = ("forward", "backward")
    seconds = np.array([[server_seconds(plan, cost, way) for plan in plans] for way in ways]).sum(axis=1)
    return bool((seconds.max(axis=1) <= seconds.mean(axis=1) * (1 + _FEWER_PIECES)).all())


def cheaper(
    by_nano_batch: Callable[[], tuple[Layout, ...]],
    together: Callable[[], tuple[Layout, ...]],
    price: Callable[[tuple[Layout, ...]], Price],
    none_is_long: bool,
) -> tuple[Layout, ...]:
    """Returns the layouts of the cheaper placement.

    Args:
        by_nano_batch: makes the placement "apart".
        together: makes the placement "together".
        none_is_long: whether no document has clearly more attention work than a rank's mean. ``together`` is called
            only if rows travel in "apart", and ranks wait for them there or ``none_is_long`` is True.
    """
    apart = by_nano_batch()
    before = price(apart)
    if not before.bytes or not (before.exposed or none_is_long):
        return apart
    both = together()
    after = price(both)
    return both if after.beats(before) else apart


def price_of(nanos: NanoPlans, cost: CostModel, links: Links, resend: bool, sinks: bool = False) -> Price:
    """Returns the price of one layer of a micro-batch.

    With ``resend`` homes send rows again for backward, because servers do not keep them. The log-sum-exp of each query
    row travels too, with ``resend`` or if heads have ``sinks``: learned scores in the softmax."""
    attention, exposed, moved, shape = 0.0, 0.0, 0, cost.shape
    rows_of: dict[Plan, Traffic] = {}
    q, o, kv, lse = shape.q_bytes, shape.o_bytes, shape.kv_bytes, 4 * shape.heads if resend or sinks else 0
    # Each tuple has a query row's bytes to the server, its bytes back home, and the same two of a key/value row. In
    # backward dO, or with "resend" q, k, v, o and dO, go to the server, and dQ, dK and dV return. Log-sum-exps return
    # in forward, and go to the server in backward.
    backward = (q + 2 * o + lse, q, kv, kv) if resend else (o + lse, q, 0, kv)
    directions: tuple[tuple[Direction, tuple[int, int, int, int]], ...] = (
        ("forward", (q, o + lse, kv, 0)),
        ("backward", backward),
    )
    for way, (direction, row_bytes) in enumerate(directions):
        plans = [nano[way] for nano in nanos]
        slowest = [float(server_seconds(plan, cost, direction).max()) for plan in plans]
        attention += sum(slowest)
        q_bytes, kv_bytes = shape.moved_bytes(direction, resend, sinks)
        for own, plan in zip(slowest, plans, strict=True):
            if plan not in rows_of:
                rows_of[plan] = traffic(plan, links)
            rows, node = rows_of[plan], links.nodes(plan.layout.ranks)
            moved += rows.q_rows * q_bytes + rows.kv_rows * kv_bytes
            # A byte between nodes takes "network_price" times as long as one inside. The first term counts it once.
            far = rows.between(node).busiest(*row_bytes)
            travel = (rows.busiest(*row_bytes) + (links.network_price - 1) * far) / links.bytes_per_s(far=False)
            exposed += max(float(travel.max()) - (sum(slowest) - own), 0.0)
    return Price(attention, exposed, moved)
