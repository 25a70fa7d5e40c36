"""The runtime on gloo ranks, with random plans, against whole documents in one process: float64."""

import weakref
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from distca.attention.reference import ReferenceKernel
from distca.data.sampler import MicroBatch
from distca.plan import AttentionKind, Links, PlanOptions, analytic_cost, lay_out, plan_at_home, plan_step
from distca.runtime import AttentionPool, NanoRoutes, run_layers
from distca.runtime.attention_call import AttentionCall
from distca.runtime.kept_rows import Keep
from distca.runtime.timeline import Timeline
from distca.simulate import Cluster, Job, Workload, dense
from distca.simulate.cad import Cad
from distca.simulate.streams import Streams
from distca.testing.plans import random_plan
from distca.testing.ranks import run_cases, run_ranks
from distca.testing.reference_attention import relative_error
from distca.transport import choose_transport
from tests.attention.rounded_kernel import RoundedKernel
from tests.runtime.toy_layers import toy_layers
from tests.testing.asked import asked

pytestmark = pytest.mark.slow

WIDTH, LAYERS, TOLERANCE = 12, 3, 1e-12
FULL = AttentionKind(6**-0.5)
SHAPE = {"count": LAYERS, "width": WIDTH, "heads": 4, "kv_heads": 2, "head_dim": 6, "seed": 5}

CASES = {
    "odd lengths": (13, 7, 1, 29, 3),
    "one document over all ranks": (61,),
    "length 1 only": (1, 1, 1, 1, 1),
    "one token": (1,),
    "many documents": tuple(1 + (7 * n) % 5 for n in range(300)),
    "no documents": (),
}


ROW_MOVES = ("launch", "join", "serve")


@dataclass(frozen=True)
class Run:
    """Layers that some ranks run with random plans.

    Attributes:
        ranks: number of ranks.
        lengths: tokens of each document.
        nano_batches: 2 for ping-pong.
        backward: keep or resend.
        recompute: everything but core attention is computed anew in the backward.
        padding: rows without a token behind each rank's own.
        seed: of plans.
        rank_of: each document's rank; None deals them.
        per_node: ranks of a node; 0 for one node.
        kinds: each layer's kind of attention; none for full attention.
        record: note what is done in which order.
        value_dim: elements of a head of values; 0 for those of keys.
    """

    ranks: int
    lengths: tuple[int, ...]
    nano_batches: int = 2
    backward: str = "keep"
    recompute: bool = False
    padding: int = 0
    seed: int = 0
    rank_of: tuple[int, ...] | None = None
    per_node: int = 0
    kinds: tuple[AttentionKind, ...] = ()
    record: bool = False
    value_dim: int = 0


def _simulated_order(backward, nano_batches=2, **layers):
    model = dense(LAYERS, WIDTH, WIDTH, heads=4, kv_heads=2, head_dim=6, vocabulary=8, **layers)
    job = Job(model, Cluster(2), analytic_cost(4, 2, 6), tokens_per_rank=46)
    workload = Workload((MicroBatch(np.arange(5), np.array([13, 7, 40, 29, 3]), None),), 1)
    how = {"kinds": job.kinds, "costs": job.costs, "layer_kinds": job.layer_kinds}
    options = PlanOptions(2, job.costs[0], nano_batches=nano_batches, resend=backward == "resend", **how)
    streams = Streams(job.fabric)
    Cad(job, plan_step([each.lengths for each in workload.micro_batches], options), streams).run()
    return [entry for entry in streams.order if entry.startswith(ROW_MOVES)]


def _documents(lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    hidden = torch.randn(sum(lengths), WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(sum(lengths), WIDTH, generator=generator, dtype=torch.float64)
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(int)
    return hidden, weight, starts


def _rows_of(layout, rank, starts):
    mine = layout.q.on_rank(rank)
    return [
        row
        for document, start, stop in zip(mine.document, mine.start, mine.stop, strict=True)
        for row in range(starts[document] + start, starts[document] + stop)
    ]


def _routes(kind, layouts, backward, seed, per_node):
    """A rank's routes of random plans for layers of one kind."""
    routes, previous, tasks_before = [], None, None
    for nano, layout in enumerate(layouts):
        cuts = 8 if per_node else 3
        before = tasks_before if backward == "keep" and not kind.window else None
        forward = replace(random_plan(layout, seed + nano, cuts, kind.window), before=before)
        tasks_before = forward.tasks
        back = random_plan(layout, seed + nano + 100, cuts, kind.window) if backward == "resend" else forward
        routes.append(NanoRoutes.of(forward, back, dist.get_rank(), [kind], "cpu", previous, Links(per_node)))
        previous = layout
    return tuple(routes)


def _run_rank(run):
    lengths, kinds, backward, padding = run.lengths, run.kinds, run.backward, run.padding
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layouts = lay_out(lengths, ranks, nano_batches=run.nano_batches, rank_of=run.rank_of)
    of_kind = {
        kind: _routes(kind, layouts, backward, run.seed, run.per_node) for kind in dict.fromkeys(kinds or (FULL,))
    }
    routes = [of_kind[kind] for kind in kinds or (FULL,) * LAYERS]
    timeline = Timeline("cpu")
    if run.record:
        timeline.start_recording()
    kernel = RoundedKernel() if rank % 2 else ReferenceKernel()  # a task's two directions may run by unlike kernels
    pool = AttentionPool(choose_transport("auto", dist.group.WORLD), kernel, timeline, backward)
    hidden, weight, starts = _documents(lengths)
    rows = [_rows_of(layout, rank, starts) for layout in layouts]
    inputs = [torch.cat((hidden[r], hidden.new_zeros(padding, WIDTH))).requires_grad_() for r in rows]
    layers = toy_layers(**SHAPE, kinds=kinds, value_dim=run.value_dim)
    recomputed = (
        (lambda function, *tensors: checkpoint(function, *tensors, use_reentrant=True)) if run.recompute else None
    )
    outputs = run_layers(layers, inputs, routes, pool, recomputed)
    sum((out[: len(r)] * weight[r]).sum() for out, r in zip(outputs, rows, strict=True)).backward()
    return {
        "rows": rows,
        "out": [out[: len(r)].detach() for out, r in zip(outputs, rows, strict=True)],
        "input_grad": [x.grad[: len(r)] for x, r in zip(inputs, rows, strict=True)],
        "weight_grad": _gradients(layers),
        "order": timeline.order,
        "second_hops": sum(
            each.kv_to_server.relay_after is not None
            for halves in routes
            for r in halves
            for each in (r.forward, r.backward)
        ),
    }


def _gradients(layers):
    """All weights' gradients in one row."""
    weights = [each for layer in layers for each in (layer.qkv, layer.out, layer.sink) if each is not None]
    return torch.cat(
        [torch.zeros_like(each).flatten() if each.grad is None else each.grad.flatten() for each in weights]
    )


def _left_by_calls(backward):
    """By attention call: how many tensors it held in its backward, and how many of these are alive when its gradients
    are sent home."""
    held, left = {}, []

    def note(call):
        parts = [call, call._kept, call._server, *(each for each in vars(call._kept).values() if hasattr(each, "kv"))]
        rows = [vars(part) for part in parts if part is not None]
        tensors = {id(each): each for each in tree_leaves(rows) if isinstance(each, torch.Tensor)}.values()
        held.setdefault(id(call), []).extend(weakref.ref(each) for each in tensors)

    def count(call):
        left.append((len(held[id(call)]), sum(each() is not None for each in held[id(call)])))

    def look_before(name, look):
        step = getattr(AttentionCall, name)

        def looking(call, *arguments):
            look(call)
            return step(call, *arguments)

        setattr(AttentionCall, name, looking)

    look_before("_launch_do", note)
    look_before("_serve_backward", note)
    look_before("_launch_gradients", count)
    _run_rank(Run(2, CASES["odd lengths"], backward=backward, padding=2, seed=1))
    return left


def _check(run, results):
    """Hold what the ranks computed against whole documents; how many routes took a second hop."""
    hidden, weight, _ = _documents(run.lengths)
    hidden.requires_grad_()
    layers = toy_layers(**SHAPE, kinds=run.kinds, value_dim=run.value_dim)
    expected = hidden
    for layer in layers:
        expected = layer.whole(expected, list(run.lengths))
    (expected * weight).sum().backward()
    out, grad = torch.zeros_like(hidden), torch.zeros_like(hidden)
    for result in results:
        for rows, o, g in zip(result["rows"], result["out"], result["input_grad"], strict=True):
            out[rows], grad[rows] = o, g
    assert relative_error(out, expected) <= TOLERANCE
    assert relative_error(grad, hidden.grad if len(hidden) else grad) <= TOLERANCE
    weight_grad = _gradients(layers)
    assert relative_error(sum(result["weight_grad"] for result in results), weight_grad) <= TOLERANCE
    return sum(result["second_hops"] for result in results)


WINDOW = AttentionKind(6**-0.5, window=5)
KINDS = {
    "window of one": (AttentionKind(0.3, window=1),) * LAYERS,
    "window": (WINDOW,) * LAYERS,
    "windows and full": (WINDOW, FULL, AttentionKind(6**-0.5, window=17)),
    "sinks": (AttentionKind(0.7, sink=True),) * LAYERS,
    "sinks in windows, softcap": (
        AttentionKind(6**-0.5, window=4, sink=True),
        AttentionKind(6**-0.5, softcap=1.5),
        AttentionKind(6**-0.5, window=9, softcap=2.0, sink=True),
    ),
}
BACKWARDS = ("keep", "resend")


def _runs():
    """By name. Tasks of windows are anywhere here, and shards shorter and longer than these."""
    odd, runs = CASES["odd lengths"], {}
    for number, (ranks, halves) in enumerate(product((1, 2, 4), (1, 2))):
        # Every two of ranks, halves and kinds of backward meet.
        backward = BACKWARDS[(number + number // 2) % 2]
        run = Run(ranks, odd, halves, backward, recompute=True, seed=ranks)
        runs[f"{ranks} ranks, {halves} halves, {backward}"] = run
    for turn, backward in enumerate(BACKWARDS):
        for name, lengths in CASES.items():
            runs[f"{name}, {backward}"] = Run(3, lengths, backward=backward, padding=2, seed=len(name))
        runs[f"narrow values, {backward}"] = Run(3, odd, backward=backward, padding=2, value_dim=4)
        for number, (name, kinds) in enumerate(KINDS.items()):
            how = {"backward": backward, "seed": len(name), "kinds": kinds}
            if number % 2 == turn:  # each kind has one backward on one node and the other on two
                runs[f"{name}, {backward}, nodes"] = Run(4, (50, 3, 4), per_node=2, **how)
            else:
                again = len(name) % 2 == 0
                runs[f"{name}, {backward}"] = Run(3, (13, 7, 1, 40, 3), padding=1, recompute=again, **how)
        runs[f"over two nodes of three, {backward}"] = Run(
            6, CASES["one document over all ranks"], backward=backward, padding=1, per_node=3
        )
    for seed in range(4):
        lengths = tuple(np.random.default_rng(seed).integers(1, 40, size=9).tolist())
        how = {"backward": BACKWARDS[seed % 2], "recompute": seed % 3 == 0, "seed": seed}
        runs[f"seed {seed}, nodes"] = Run(4, lengths, per_node=2, **how)
    runs["whole documents and a rank without tokens"] = Run(4, (5, 40, 3, 9), rank_of=(0, 2, 0, 3))
    return runs


RUNS = _runs()
ORDERED = (13, 7, 40, 29, 3)
IN_ORDER = {
    (backward, again): Run(2, ORDERED, 2, backward, again, record=True)
    for backward in BACKWARDS
    for again in (False, True)
}
KINDS_IN_ORDER = {
    backward: Run(2, ORDERED, backward=backward, record=True, kinds=(WINDOW, FULL, WINDOW)) for backward in BACKWARDS
}


WHOLE_IN_ORDER = {backward: Run(2, ORDERED, 1, backward, record=True) for backward in BACKWARDS}


MATRIX = {
    "length 1 only, resend",
    "one token, keep",
    "many documents, resend",
    "no documents, keep",
    "window of one, resend",
    "window, keep",
    "sinks, keep",
    "windows and full, keep, nodes",
    "sinks in windows, softcap, keep, nodes",
    "seed 2, nodes",
    "seed 3, nodes",
}
"""Runs whose lengths and kinds of layers are there with the other backward, or as other runs."""


@pytest.fixture(scope="module")
def results(request):
    """Of so many ranks the results of all runs that tests ask for, in one start of them."""
    ordered = (*IN_ORDER.values(), *KINDS_IN_ORDER.values(), *WHOLE_IN_ORDER.values())
    runs = {*(RUNS[name] for name in asked(request, "name")), *ordered}

    @cache
    def of(ranks):
        return run_cases(ranks, _run_rank, {run: (run,) for run in runs if run.ranks == ranks})

    return of


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.matrix] if name in MATRIX else []) for name in RUNS]
)
def test_outputs_and_gradients(results, name):
    run = RUNS[name]
    second_hops = _check(run, results(run.ranks)[run])
    assert second_hops or run.kinds or not run.per_node, "keys and values travel to another node once"


@pytest.mark.parametrize("backward", BACKWARDS)
def test_kinds_are_run_in_the_order_in_which_they_are_simulated(results, backward):
    expected = _simulated_order(backward, layer_types=["window", "full", "window"], window=WINDOW.window)
    assert len(expected) == len(set(expected)) == LAYERS * 2 * 2 * 5  # halves, directions; two launches, joins, a serve
    for result in results(2)[KINDS_IN_ORDER[backward]]:
        assert [entry for entry in result["order"] if entry.startswith(ROW_MOVES)] == expected


@pytest.mark.parametrize("backward", BACKWARDS)
def test_a_single_nano_batch_is_run_in_the_order_in_which_it_is_simulated(results, backward):
    expected = _simulated_order(backward, 1)
    assert len(expected) == len(set(expected)) == LAYERS * 2 * 5  # directions; two launches, joins, a serve
    for result in results(2)[WHOLE_IN_ORDER[backward]]:
        assert [entry for entry in result["order"] if entry.startswith(ROW_MOVES)] == expected


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("backward", BACKWARDS)
def test_backward_hides_every_transfer_behind_the_other_half(results, backward, recompute):
    """Each reverse transfer is launched before the other half's compute and joined after it, on every rank."""
    sent = "dO" if backward == "keep" else "q,k,v,o,dO"
    for result in results(2)[IN_ORDER[backward, recompute]]:
        at = {name: place for place, name in enumerate(result["order"])}
        assert len(at) == len(result["order"])

        def hidden(what, layer, half, behind, at=at):
            launch, join = (f"{action} {what} {layer} {half} backward" for action in ("launch", "join"))
            return at[launch] < at[behind] < at[join]

        for layer in range(LAYERS):
            assert hidden("dq,dk,dv", layer, "pong", f"serve {layer} ping backward")
            assert hidden("dq,dk,dv", layer, "ping", f"post+pre {layer} pong backward")
            assert hidden(sent, layer, "ping", f"serve {layer} pong backward")
        for layer in range(LAYERS - 1):
            assert hidden(sent, layer, "pong", f"post+pre {layer + 1} ping backward")
        # And in the same order as the simulator has it.
        assert [entry for entry in result["order"] if entry.startswith(ROW_MOVES)] == _simulated_order(backward)


@pytest.mark.parametrize("backward", ["keep", "resend"])
def test_attention_lets_go_of_its_rows_in_its_own_backward(backward):
    """And not only when the whole graph goes."""
    for left in run_ranks(2, _left_by_calls, backward):
        assert len(left) == 2 * LAYERS
        assert all(held > 3 and alive == 0 for held, alive in left)


def _run_without_gradients():
    (layout,) = lay_out([13, 7, 29], 1)
    pool = AttentionPool(choose_transport("auto", dist.group.WORLD), ReferenceKernel(), Timeline("cpu"), "keep")
    kept = []
    joined, Keep.joined = Keep.joined, lambda rows, o, lse: kept.append(len(o)) or joined(rows, o, lse)
    layers = toy_layers(**SHAPE)
    routes = [(NanoRoutes.of(plan_at_home(layout), plan_at_home(layout), 0, [FULL], "cpu"),)] * len(layers)
    hidden = torch.randn(49, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        run_layers(layers, [hidden], routes, pool)
    without = len(kept)
    run_layers(layers, [hidden], routes, pool)
    return without, len(kept)


def test_where_no_backward_comes_no_o_is_kept_for_it():
    assert run_ranks(1, _run_without_gradients) == [(0, LAYERS)]
