"""Documents, layouts and plans for hypothesis, and all routes of a plan carried out in numpy."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from distca.plan import (
    CostModel,
    Layout,
    Links,
    Plan,
    Route,
    RowExchange,
    Segments,
    Tasks,
    imbalance,
    lay_out,
    plan_at_home,
    route,
    server_seconds,
    traffic,
)

links = st.sampled_from((None, Links(), Links(1), Links(2), Links(3)))
lengths = st.lists(st.integers(1, 40), min_size=0, max_size=14) | st.lists(st.integers(1, 400), min_size=1, max_size=4)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, ...]:
    """One or two nano-batches: spanning or whole documents, odd lengths, empty ranks, a document over everything."""
    documents = draw(lengths)
    ranks = draw(st.integers(1, 6))
    nano_batches = draw(st.sampled_from((1, 2)))
    dealing = draw(st.sampled_from(("in_order", "even", "lean")))
    if draw(st.booleans()):
        rank_of = draw(st.lists(st.integers(0, ranks - 1), min_size=len(documents), max_size=len(documents)))
        return lay_out(documents, ranks, nano_batches=nano_batches, rank_of=rank_of, dealing=dealing)
    align = draw(st.sampled_from((1, 4)))
    placement = draw(st.sampled_from(("in_order", "spread", "spread_by_nano_batch")))
    return lay_out(documents, ranks, nano_batches=nano_batches, align=align, dealing=dealing, placement=placement)


@st.composite
def arbitrary_plans(draw: st.DrawFn) -> Plan:
    """Any legal plan: every document cut anywhere, every part on any server."""
    return _any_plan(draw, draw(st.sampled_from(draw(layouts()))))


@st.composite
def arbitrary_halves(draw: st.DrawFn) -> tuple[Plan, Plan]:
    """Any legal plans of two halves, whose servers keep rows of the first for the second."""
    ping, pong = (_any_plan(draw, layout) for layout in draw(layouts().filter(lambda found: len(found) == 2)))
    return ping, replace(pong, before=ping.tasks)


def _any_plan(draw: st.DrawFn, layout: Layout) -> Plan:
    columns: list[tuple[int, int, int, int]] = []
    for document, (first, last) in enumerate(zip(layout.first.tolist(), layout.last.tolist(), strict=True)):
        if first < last:
            inside = st.integers(first, last)
            cuts = sorted({first, last, *draw(st.lists(inside, max_size=4))})
            servers = st.integers(0, layout.ranks - 1)
            columns += [(document, a, b, draw(servers)) for a, b in pairwise(cuts)]
    table = np.array(columns, np.int64).reshape(-1, 4).T
    return Plan(layout, Tasks.sorted(*table))


def home_rows(layout: Layout, kind: str) -> list[np.ndarray]:
    """Per rank, [rows, 2] (document, position) of the rows it holds: query rows, or carried and own k,v rows."""
    shards, counts = (layout.q, layout.q_rows) if kind == "q" else (layout.kv, layout.kv_rows)
    tensors = [np.full((int(count), 2), -1) for count in counts]
    for document, start, stop, rank, row in zip(*shards.columns(), strict=True):
        rows = tensors[rank][row : row + stop - start]
        assert (rows == -1).all(), "two shards share a row"
        rows[:, 0], rows[:, 1] = document, np.arange(start, stop)
    assert all((tensor >= 0).all() for tensor in tensors), "a row without a token"
    return tensors


def arrived(made: list[Route], kind: str, tensors: list[np.ndarray]) -> list[np.ndarray]:
    """What every server's buffer of q or kv rows holds after all ranks sent, received, kept and handed on; -1 where
    nothing arrived."""
    exchanges = [getattr(part, kind) for part in made]
    buffers = [
        np.full((exchange.destination_rows, *tensor.shape[1:]), -1, tensor.dtype)
        for exchange, tensor in zip(exchanges, tensors, strict=True)
    ]
    for rank, exchange in enumerate(exchanges):
        for peer, source, destination, rows in each(exchange.receive):
            buffers[rank][destination : destination + rows] = tensors[peer][source : source + rows]
        for _, source, destination, rows in each(exchange.keep):
            buffers[rank][destination : destination + rows] = tensors[rank][source : source + rows]
    first = [buffer.copy() for buffer in buffers]
    for rank, relay in enumerate(relays(made, kind)):
        for peer, source, destination, rows in each(relay.receive):
            assert (buffers[rank][destination : destination + rows] == -1).all(), "a row came twice"
            buffers[rank][destination : destination + rows] = first[peer][source : source + rows]
    return buffers


def deliver(
    made: list[Route], kind: str, tensors: list[np.ndarray], before: list[np.ndarray] | None = None
) -> list[np.ndarray]:
    """What every server's tasks find, with the buffers of the half ``before``."""
    buffers = arrived(made, kind, tensors)
    for rank, exchange in enumerate(getattr(part, kind) for part in made):
        if len(exchange.repeat):
            own, ends = buffers[rank], exchange.repeat.destination + exchange.repeat.rows
            region = np.full((ends.max(), *own.shape[1:]), -1, own.dtype)
            for copies, buffer in ((exchange.repeat, own), (exchange.before, own if before is None else before[rank])):
                for _, source, destination, rows in each(copies):
                    assert (region[destination : destination + rows] == -1).all(), "a row twice"
                    region[destination : destination + rows] = buffer[source : source + rows]
            buffers[rank] = region
    return buffers


def return_home(
    made: list[Route], kind: str, gradients: list[np.ndarray], before: list[np.ndarray] | None = None
) -> list[np.ndarray]:
    """The reverse: rows that tasks share are added up on the server, those of the half ``before`` in its buffer; rows
    that were handed on then on their gateway, and at last all go home and are added up there."""
    gradients = [gradient.copy() for gradient in gradients]
    for rank, exchange in enumerate(getattr(part, kind) for part in made):
        if len(exchange.repeat):
            own = np.zeros(exchange.destination_rows)
            for copies, target in ((exchange.repeat, own), (exchange.before, before and before[rank])):
                for _, source, destination, rows in each(copies):
                    target[source : source + rows] += gradients[rank][destination : destination + rows]
            gradients[rank] = own
    return through_gateways(made, kind, gradients)


def through_gateways(made: list[Route], kind: str, gradients: list[np.ndarray]) -> list[np.ndarray]:
    exchanges = [getattr(part, kind) for part in made]
    homes = [np.zeros(exchange.source_rows) for exchange in exchanges]
    for rank, relay in enumerate(relays(made, kind)):
        for peer, source, destination, rows in each(relay.receive):
            gradients[peer][source : source + rows] += gradients[rank][destination : destination + rows]
    for rank, exchange in enumerate(exchanges):
        for peer, source, destination, rows in each(exchange.receive):
            homes[peer][source : source + rows] += gradients[rank][destination : destination + rows]
        for _, source, destination, rows in each(exchange.keep):
            homes[rank][source : source + rows] += gradients[rank][destination : destination + rows]
    return homes


def each(segments: Segments) -> list[tuple[int, int, int, int]]:
    """(Peer, source, destination, rows) of segments."""
    columns = (segments.peer, segments.source, segments.destination, segments.rows)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def relays(made: list[Route], kind: str) -> list[RowExchange]:
    """Those of all ranks, if rows of this kind are handed on."""
    found = [part.relay for part in made if part.relay is not None and kind == "kv"]
    assert len(found) in (0, len(made)), "some ranks know of no second hop"
    return found


def routes(plan: Plan, links: Links | None = None) -> list[Route]:
    return [route(plan, rank, links) for rank in range(plan.layout.ranks)]


def exchanges_of(made: list[Route]) -> list[list[RowExchange]]:
    """Of all ranks: of q rows, of kv rows and, where there is one, of rows that are handed on."""
    return [found for kind in ("q", "kv", "relay") if None not in (found := [getattr(part, kind) for part in made])]


def readers(plan: Plan) -> dict[tuple[int, int], int]:
    """How many tasks read the k,v row of each (document, position)."""
    tasks = plan.tasks
    counts: dict[tuple[int, int], int] = {}
    for document, stop in zip(tasks.document.tolist(), tasks.stop.tolist(), strict=True):
        for position in range(stop):
            counts[document, position] = counts.get((document, position), 0) + 1
    return counts


def kilobytes(plan: Plan) -> float:
    """A moved q row counts with its o row."""
    moved = traffic(plan)
    return 16 * moved.q_rows + 4 * moved.kv_rows


def home_imbalance(layout: Layout, cost: CostModel) -> float:
    """Slowest over mean with everything at home, in the worse direction."""
    plan = plan_at_home(layout)
    return max(imbalance(server_seconds(plan, cost, direction)) for direction in ("forward", "backward"))
