"""Documents, layouts and plans for hypothesis, and all routes of a plan carried out in numpy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from distca.plan import (
    CostModel,
    Layout,
    Plan,
    Route,
    RowExchange,
    Tasks,
    imbalance,
    lay_out,
    plan_at_home,
    route,
    server_seconds,
    traffic,
)

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
    placement = draw(st.sampled_from(("in_order", "spread", "spread_by_half")))
    return lay_out(documents, ranks, nano_batches=nano_batches, align=align, dealing=dealing, placement=placement)


@st.composite
def arbitrary_plans(draw: st.DrawFn) -> Plan:
    """Any legal plan: every document cut anywhere, every part on any server."""
    layout = draw(st.sampled_from(draw(layouts())))
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


def deliver(exchanges: list[RowExchange], tensors: list[np.ndarray]) -> list[np.ndarray]:
    """What every server's buffer holds after all ranks sent, received, kept and repeated; -1 where nothing arrived."""
    buffers = []
    for rank, exchange in enumerate(exchanges):
        buffer = np.full((exchange.destination_rows, *tensors[rank].shape[1:]), -1, tensors[rank].dtype)
        received = exchange.receive
        for peer, source, destination, rows in zip(
            received.peer, received.source, received.destination, received.rows, strict=True
        ):
            buffer[destination : destination + rows] = tensors[peer][source : source + rows]
        for source, destination, rows in zip(
            exchange.keep.source, exchange.keep.destination, exchange.keep.rows, strict=True
        ):
            buffer[destination : destination + rows] = tensors[rank][source : source + rows]
        for source, destination, rows in zip(
            exchange.repeat.source, exchange.repeat.destination, exchange.repeat.rows, strict=True
        ):
            buffer[destination : destination + rows] = buffer[source : source + rows]
        buffers.append(buffer)
    return buffers


def return_home(exchanges: list[RowExchange], gradients: list[np.ndarray]) -> list[np.ndarray]:
    """The reverse: repeated rows are added up on the server, then every row goes home and is added up there."""
    homes = [np.zeros(exchange.source_rows) for exchange in exchanges]
    for rank, exchange in enumerate(exchanges):
        gradient = gradients[rank].copy()
        repeat, received, keep = exchange.repeat, exchange.receive, exchange.keep
        for source, destination, rows in zip(repeat.source, repeat.destination, repeat.rows, strict=True):
            gradient[source : source + rows] += gradient[destination : destination + rows]
        for peer, source, destination, rows in zip(
            received.peer, received.source, received.destination, received.rows, strict=True
        ):
            homes[peer][source : source + rows] += gradient[destination : destination + rows]
        for source, destination, rows in zip(keep.source, keep.destination, keep.rows, strict=True):
            homes[rank][source : source + rows] += gradient[destination : destination + rows]
    return homes


def routes(plan: Plan) -> list[Route]:
    return [route(plan, rank) for rank in range(plan.layout.ranks)]


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
