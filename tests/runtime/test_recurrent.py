"""Recurrent layers on gloo ranks against whole documents in one process: outputs and all gradients in float64.

All cases and all wrong variants run in one start of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from distca.attention.reference import ReferenceKernel
from distca.models.hybrid import Hybrid
from distca.plan import AttentionKind, Layout, PlanOptions, analytic_cost, lay_out, plan_step
from distca.recurrent import CoreRows
from distca.recurrent.reference import ReferenceRecurrence
from distca.runtime import AttentionPool, NanoRoutes, recurrent_call, recurrent_routes, run_layers
from distca.runtime.recurrent_call import RecurrentCall
from distca.runtime.recurrent_routes import RecurrentRoutes
from distca.runtime.timeline import Timeline
from distca.simulate import Cluster, Job, dense
from distca.simulate.cad import Cad
from distca.simulate.streams import Streams
from distca.testing.plans import random_plan
from distca.testing.ranks import run_ranks
from distca.testing.reference_attention import relative_error
from distca.transport import choose_transport
from tests.plan.recurrent.cases import cut_anywhere, random_cuts
from tests.recurrent.cases import RECURRENCES
from tests.runtime.toy_layers import ToyLayer, toy_layers
from tests.runtime.toy_recurrent import ToyRecurrentLayer, toy_recurrent_layers
from tests.testing.asked import asked

RANKS, WIDTH, PADDING, TOLERANCE = 4, 6, 2, 1e-12
GATED_DELTA_NET, MAMBA = RECURRENCES.values()


@dataclass(frozen=True)
class Case:
    layouts: tuple[Layout, ...]
    attention: bool = False  # between two recurrent layers, in the planner's layouts
    recompute: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def lengths(self) -> list[int]:
        stop = np.concatenate([each.q.stop for each in self.layouts])
        document = np.concatenate([each.q.document for each in self.layouts])
        return [int(stop[document == n].max()) for n in range(int(document.max(initial=-1)) + 1)]


def _planned(lengths: list[int], **how: Any) -> tuple[Layout, ...]:
    return lay_out(lengths, RANKS, **({"nano_batches": 2} | how))


def _in_pieces(halves: int = 2) -> tuple[Layout, ...]:
    """Documents of 1 to 7 pieces, which are of 1 to 4 rows."""
    random = np.random.default_rng(7)
    return cut_anywhere([np.cumsum(random.integers(1, 5, n)).tolist() for n in range(1, 8)], RANKS, 3, halves)


CASES = {
    "one to seven pieces": Case(_in_pieces(), recompute=True),
    "one to seven pieces, one half": Case(_in_pieces(halves=1)),
    "pieces of one row": Case(cut_anywhere([range(1, 9), range(1, 4), [1]], RANKS, 2)),
    **{f"cut anywhere {seed}": Case(cut_anywhere(random_cuts(seed), RANKS, seed)) for seed in (3, 5, 8)},
    "planned, with attention": Case(_planned([13, 7, 1, 29, 3]), attention=True),
    "one half, with attention": Case(_planned([13, 7, 1, 29, 3], nano_batches=1), attention=True),
    "one document over all ranks": Case(_planned([61]), attention=True, recompute=True),
    "length 1 only": Case(_planned([1, 1, 1, 1, 1])),
    "one token": Case(_planned([1])),
    "no documents": Case(_planned([])),
    "whole documents, a rank without tokens": Case(_planned([5, 20, 3, 9], rank_of=[0, 2, 0, 3])),
    "bfloat16": Case(_in_pieces(), dtype=torch.bfloat16),
}


def _layers(case: Case) -> list[ToyLayer | ToyRecurrentLayer]:
    first, *others = toy_recurrent_layers((GATED_DELTA_NET, MAMBA, GATED_DELTA_NET), WIDTH, 5, case.dtype)
    return [first, *(toy_layers(1, WIDTH, 2, 1, 4, seed=5) if case.attention else ()), *others]


def _weights(layer: ToyLayer | ToyRecurrentLayer) -> list[torch.Tensor]:
    return layer.weights if isinstance(layer, ToyRecurrentLayer) else [layer.qkv, layer.out]


def _weight_gradients(layers: list[ToyLayer | ToyRecurrentLayer]) -> torch.Tensor:
    weights = [weight for layer in layers for weight in _weights(layer)]
    return torch.cat([torch.zeros_like(w).flatten() if w.grad is None else w.grad.flatten() for w in weights])


def _documents(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(sum(case.lengths), WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))


def _rows(case: Case, half: int, rank: int) -> list[int]:
    starts = np.concatenate(([0], np.cumsum(case.lengths))).astype(int)
    mine = case.layouts[half].q.on_rank(rank)
    each = zip(mine.document, mine.start, mine.stop, strict=True)
    return [row for document, start, stop in each for row in range(starts[document] + start, starts[document] + stop)]


def _run(case: Case) -> dict[str, Any]:
    """One rank's part of a case."""
    rank = dist.get_rank()
    timeline = Timeline("cpu")
    timeline.start_recording()
    pool = AttentionPool(choose_transport("auto", dist.group.WORLD), ReferenceKernel(), timeline, "keep")
    hidden, weight = _documents(case)
    rows = [_rows(case, half, rank) for half in range(len(case.layouts))]
    padding = torch.full((PADDING, WIDTH), 3.0, dtype=torch.float64)
    inputs = [torch.cat((hidden[r], padding)).to(case.dtype).requires_grad_() for r in rows]
    layers = _layers(case)
    pieces = RecurrentRoutes.of(case.layouts, rank, GATED_DELTA_NET.halo_rows, "cpu")
    routes = [pieces if isinstance(each, ToyRecurrentLayer) else _attention_routes(case, rank) for each in layers]
    recomputed = (lambda function, *each: checkpoint(function, *each, use_reentrant=True)) if case.recompute else None
    outputs = run_layers(layers, inputs, routes, pool, recomputed)
    sum((out[: len(r)] * weight[r].to(case.dtype)).sum() for out, r in zip(outputs, rows, strict=True)).backward()
    return {
        "rows": [row for half in rows for row in half],
        "out": torch.cat([out[: len(r)].detach() for out, r in zip(outputs, rows, strict=True)]),
        "input": torch.cat([x.grad[: len(r)] for x, r in zip(inputs, rows, strict=True)]),
        "padding": sum(float(x.grad[len(r) :].abs().sum()) for x, r in zip(inputs, rows, strict=True)),
        "weights": _weight_gradients(layers),
        "order": timeline.order,
    }


def _attention_routes(case: Case, rank: int) -> tuple[NanoRoutes, ...]:
    kinds, previous = [AttentionKind(0.5)], [None, *case.layouts]
    plans = [random_plan(layout, 3) for layout in case.layouts]
    return tuple(
        NanoRoutes.of(plan, plan, rank, kinds, "cpu", before) for plan, before in zip(plans, previous, strict=False)
    )


# Five wrong ways, each of which the comparison must see.


@contextmanager
def _halo_off_by_one() -> Iterator[None]:
    def wrong(route, *rest, of=recurrent_routes._of):
        return of(replace(route, halo=replace(route.halo, picked=np.roll(route.halo.picked, 1, axis=1))), *rest)

    with patch.object(recurrent_routes, "_of", wrong):
        yield


@contextmanager
def _padding_that_writes() -> Iterator[None]:
    def wrong(route, *rest, of=recurrent_routes._of):
        end = route.end.copy()
        end[-1:] += PADDING
        return of(replace(route, end=end), *rest)

    with patch.object(recurrent_routes, "_of", wrong):
        yield


@contextmanager
def _summaries_in_bfloat16() -> Iterator[None]:
    def wrong(call, *rest, send=RecurrentCall._send_states):
        for states in (call._own, call._transitions):
            states.update({piece: state.bfloat16().to(state.dtype) for piece, state in states.items()})
        send(call, *rest)

    with patch.object(RecurrentCall, "_send_states", wrong):
        yield


@contextmanager
def _pieces_in_another_order() -> Iterator[None]:
    def wrong(arrived, routes, passed, backward, reached=recurrent_call.states_before):
        chains = []
        for document, links in routes.chains:
            inner = [n for n, link in enumerate(links) if link.transition >= 0]
            turned = list(links)
            for place, other in zip(inner, reversed(inner), strict=True):
                turned[place] = replace(links[other], piece=links[place].piece)
            chains.append((document, tuple(turned)))
        return reached(arrived, replace(routes, chains=tuple(chains)), passed, backward)

    with patch.object(recurrent_call, "states_before", wrong):
        yield


@contextmanager
def _a_decay_left_out() -> Iterator[None]:
    def wrong(kernel, rows, spans, summaries=ReferenceRecurrence.summaries):
        own, _ = summaries(kernel, rows, spans)
        g = rows.g.clone()
        for begin, _ in spans:
            g[begin] = 0
        return own, summaries(kernel, CoreRows(rows.q, rows.k, rows.v, g, rows.beta), spans)[1]

    with patch.object(ReferenceRecurrence, "summaries", wrong):
        yield


WRONG = {
    "halo off by one": _halo_off_by_one,
    "summaries in bfloat16": _summaries_in_bfloat16,
    "pieces in another order": _pieces_in_another_order,
    "a decay left out": _a_decay_left_out,
    "padding that writes": _padding_that_writes,
}
RUNS = {**dict.fromkeys(CASES, nullcontext), **WRONG}


def _case_of(run: str) -> Case:
    return CASES.get(run) or replace(CASES["one to seven pieces"], recompute=False)


def _run_all(runs: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for run in runs:
        with RUNS[run]():
            found[run] = _run(_case_of(run))
    return found


MATRIX = {"pieces of one row", "cut anywhere 5", "cut anywhere 8"}
"""Cases with pieces that the others have too."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    """Of the runs that tests ask for by name, and of all that are no matter of choice."""
    return run_ranks(RANKS, _run_all, [run for run in RUNS if run not in MATRIX or run in asked(request, "run")])


@cache
def _whole(name: str) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Outputs, gradients of inputs and gradients of weights of a case's whole documents, in float64."""
    case = CASES[name]
    hidden, weight = _documents(case)
    hidden.requires_grad_()
    layers = _layers(case)
    expected = hidden
    for layer in layers:
        expected = layer.whole(expected, case.lengths)
    (expected * weight).sum().backward()
    return expected.detach(), hidden.grad, _weight_gradients(layers)


def _errors(run: str, results: list[dict[str, dict[str, Any]]]) -> dict[str, float]:
    """How far a run's outputs and gradients are from those of whole documents."""
    is_case = CASES.get(run, CASES["bfloat16"]).dtype == torch.float64
    expected, of_inputs, of_weights = _whole(run if is_case else "one to seven pieces")
    out, gradient = torch.zeros_like(expected), torch.zeros_like(expected)
    for each in (result[run] for result in results):
        out[each["rows"]], gradient[each["rows"]] = each["out"].double(), each["input"].double()
        assert each["padding"] == 0 or run in WRONG
    return {
        "out": relative_error(out, expected),
        "input": relative_error(gradient, gradient if of_inputs is None else of_inputs),
        "weights": relative_error(sum(result[run]["weights"].double() for result in results), of_weights),
    }


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(name, marks=[pytest.mark.matrix] if name in MATRIX else [])
        for name, case in CASES.items()
        if case.dtype == torch.float64
    ],
)
def test_pieces_on_four_ranks(run: str, results: list[dict[str, dict[str, Any]]]) -> None:
    errors = _errors(run, results)
    assert max(errors.values()) <= TOLERANCE, errors


def test_bfloat16(results: list[dict[str, dict[str, Any]]]) -> None:
    errors = _errors("bfloat16", results)
    assert max(errors.values()) <= 0.05, errors


@pytest.mark.parametrize("run", WRONG)
def test_what_is_wrong_is_seen(run: str, results: list[dict[str, dict[str, Any]]]) -> None:
    errors = _errors(run, results)
    assert errors["out"] > 1e4 * TOLERANCE and errors["input"] > 1e4 * TOLERANCE, errors


def test_transfers_hide_behind_the_other_half(results: list[dict[str, dict[str, Any]]]) -> None:
    """Each is launched before the other half's compute and joined after it, forward and backward, on every rank."""
    for result in results:
        order = result["one to seven pieces, one half"]["order"]
        assert len(order) == len(set(order))
        at = {name: place for place, name in enumerate(result["planned, with attention"]["order"])}

        def hidden(what: str, layer: int, half: str, way: str, behind: str, at: dict[str, int] = at) -> bool:
            launch, join = (f"{action} {what} {layer} {half} {way}" for action in ("launch", "join"))
            return at[launch] < at[f"{behind} {way}"] < at[join]

        for layer in (2, 3):
            assert hidden("states", layer, "ping", "forward", f"summarise {layer} pong")
            assert hidden("states", layer, "pong", "forward", f"finish {layer} ping")
            assert hidden("halo", layer, "ping", "forward", f"post+pre {layer - 1} pong")
            assert hidden("halo", layer, "pong", "forward", f"summarise {layer} ping")
            assert hidden("dstates", layer, "ping", "backward", f"finish {layer} pong")
            assert hidden("dhalo", layer, "pong", "backward", f"finish {layer} ping")
            assert hidden("dhalo", layer, "ping", "backward", f"post+pre {layer} pong")
        assert hidden("dstates", 2, "pong", "backward", "post+pre 3 ping")


@pytest.mark.parametrize(("name", "halves"), [("planned, with attention", 2), ("one half, with attention", 1)])
def test_layers_run_in_the_order_in_which_they_are_simulated(
    results: list[dict[str, dict[str, Any]]], name: str, halves: int
) -> None:
    hybrid = Hybrid(pattern="G*GG", key_heads=1, value_heads=2, key_dim=4, value_dim=4)
    job = Job(dense(4, 8, 8, 2, 1, 4, 8, hybrid=hybrid), Cluster(RANKS), analytic_cost(2, 1, 4), tokens_per_rank=46)
    options = PlanOptions(RANKS, job.cost, nano_batches=halves)
    streams = Streams(job.fabric)
    Cad(job, plan_step([CASES[name].lengths], options), streams).run()
    moves = ("launch", "join", "serve", "summarise", "finish")
    expected = [entry for entry in streams.order if entry.startswith(moves)]
    assert len(expected) == len(set(expected)) == halves * 2 * (5 + 3 * 6)  # directions
    for result in results:
        order = result[name]["order"]
        assert [entry for entry in order if entry.startswith(moves)] == expected
