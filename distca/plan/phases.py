"""The phases of a step, and the plans of each phase.

- In a *phase*, each pipeline stage runs one micro-batch or is idle. A phase is either forward or backward.
- A *server* is a rank that computes attention for any stage. A server without a model computes nothing else.
- A *task* is a range of query rows of one document on one server.
- The *home* of a token is the rank that computes its linear layers. A *layout* has the homes of a nano-batch's tokens.
- A *nano-batch* is a whole micro-batch, or one of its two parts. In each phase, the first nano-batches of all stages
  have one plan together, and the second nano-batches another.
- Layers can be of several *kinds*. Some have a *window*, which limits how many keys a query sees; others are *full*.
- All stages run their layer i at the same time. The kinds of these layers, in the order of stages, are a *combination*,
  for example (window, full). Each combination has its own plans.

Array legend: R ranks: those of all stages, then the servers without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from distca.plan.choice import Scheduler
from distca.plan.cost.model import CostModel, Direction
from distca.plan.cost.pool import PoolCost
from distca.plan.cost.travelling import with_travel
from distca.plan.layout import Layout, Shards
from distca.plan.metrics import server_seconds
from distca.plan.options import PlanOptions
from distca.plan.plan import Plan, plan_at_home
from distca.plan.scheduler.scheduler import schedule, training_tolerance
from distca.plan.scheduler.unlike import Growth
from distca.plan.tasks import Tasks


@dataclass(frozen=True)
class Phase:
    """One phase.

    Attributes:
        micro_batches: for each stage, the number of its micro-batch from 0; None for an idle stage.
        by_combination: for each combination and nano-batch, the plan.
    """

    micro_batches: tuple[int | None, ...]
    by_combination: tuple[tuple[Plan, ...], ...]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each nano-batch, for the first combination."""
        return self.by_combination[0]


def other_seconds(options: PlanOptions, layout: Layout, direction: Direction) -> np.ndarray:
    """Returns [R] seconds of each rank's linear layers per attention layer; for direction "both" [2, R] (forward,
    backward). If ``options.non_attention`` is None, the result is [R] zeros."""
    each = options.non_attention
    if each is None:
        return np.zeros_like(layout.q_rows, np.float64)
    if direction == "both":
        return np.stack([other_seconds(options, layout, way) for way in ("forward", "backward")])
    seconds = (each.forward if direction == "forward" else each.backward) * layout.q_rows
    if each.factors:
        seconds[: len(each.factors)] *= each.factors
    return np.asarray(seconds)


def plan_phases(
    layouts: Sequence[tuple[Layout, ...]], options: PlanOptions, scheduler: Scheduler
) -> tuple[tuple[Phase, ...], tuple[Phase, ...]]:
    """Returns all forward phases, and all backward phases.

    Stage s runs the forward of micro-batch m in forward phase m + s. With p stages, stage s runs the backward of m in
    backward phase m + (p - 1) - s.

    Args:
        layouts: for each micro-batch and nano-batch, the layout over one stage's ranks.
    """
    stages, keeps = options.stages, options.keeps

    def phase(number: int, direction: Direction) -> Phase:
        due = [number - (stages - 1 - stage if direction == "backward" else stage) for stage in range(stages)]
        running = tuple(m if 0 <= m < len(layouts) else None for m in due)
        nanos = [[None if m is None else layouts[m][nano] for m in running] for nano in range(len(layouts[0]))]
        return Phase(
            running,
            tuple(_of_combination(each, nanos, options, direction, scheduler) for each in options.combinations),
        )

    numbers = range(len(layouts) + stages - 1)
    forward = tuple(phase(number, "both" if keeps else "forward") for number in numbers)
    # Servers that keep rows for backward compute the same tasks in forward and backward.
    return forward, forward if keeps else tuple(phase(number, "backward") for number in numbers)


def _of_combination(
    kinds: Sequence[int],
    nanos: Sequence[Sequence[Layout | None]],
    options: PlanOptions,
    direction: Direction,
    scheduler: Scheduler,
) -> tuple[Plan, ...]:
    """Returns a plan for each nano-batch of a phase, for one combination.

    In layers with a window, homes compute the attention of their own rows, because it is about equal on all ranks. In
    layers without a window, attention is scheduled over all servers.

    Args:
        kinds: for each stage, the index of its layer's kind.
        nanos: for each nano-batch and stage, the layout; None for an idle stage.
    """
    windows = [options.kinds[kind].window for kind in kinds]
    if not any(windows):
        plans = [_with_kinds(scheduler(_joined(nano, options), direction), nano, kinds, options) for nano in nanos]
        return tuple(with_kept_rows(plans) if options.keeps else plans)
    plans = []
    for nano in nanos:
        seen = [layout and layout.within(window) for layout, window in zip(nano, windows, strict=True)]
        home = _with_kinds(plan_at_home(_joined(seen, options)), nano, kinds, options)
        if all(windows):
            plans.append(home)
            continue
        # full [R] bool: whether a rank is in a stage without a window, or is a server without a model. "rest" has the
        # tasks of stages with a window. Their ranks compute "rest" and linear layers in "beside" seconds, so the
        # scheduler gives these ranks fewer tasks of the other stages.
        full = np.repeat([not window for window in windows], options.ranks)
        full = np.append(full, np.ones(options.servers, bool))
        rest = home.tasks.take(~full[home.tasks.server])
        beside = server_seconds(replace(home, tasks=rest), options.cost_of_kind, direction)
        beside += np.where(full, 0.0, other_seconds(options, home.layout, direction))
        scheduled = scheduler(_joined(nano, options, [not window for window in windows]), direction, beside).tasks
        columns = (np.concatenate(pair) for pair in zip(scheduled.columns(), rest.columns(), strict=True))
        plans.append(replace(home, tasks=Tasks.sorted(*columns)))
    return tuple(plans)


def with_kept_rows(plans: Sequence[Plan]) -> list[Plan]:
    """Returns the plans of a micro-batch's nano-batches, if servers keep k,v rows for the next nano-batch.

    A document may go on in the next nano-batch. There its queries need the earlier k,v rows too, which do not travel
    again to servers that keep them."""
    return [*plans[:1], *(replace(plan, before=before.tasks) for before, plan in pairwise(plans))]


def _with_kinds(plan: Plan, nano: Sequence[Layout | None], kinds: Sequence[int], options: PlanOptions) -> Plan:
    """Returns the plan with ``windows`` and ``kind`` set, from the kind of each stage's layer (``kinds``)."""
    if not any(kinds) and not any(options.windows):
        return plan
    documents = [0 if layout is None else len(layout.first) for layout in nano]
    windows = tuple(window if number in kinds else 0 for number, window in enumerate(options.windows))
    return replace(plan, windows=windows, kind=np.repeat(np.asarray(kinds, np.int64), documents))


def at_home(layout: Layout, direction: Direction, beside: np.ndarray | None = None) -> Plan:
    """Returns the plan in which homes compute their own rows.

    This function is a :class:`distca.plan.choice.Scheduler`, so it takes arguments that it does not read."""
    return plan_at_home(layout)


def scheduler_of(options: PlanOptions) -> Scheduler:
    """Returns the default scheduler."""
    tolerance = options.tolerance
    if tolerance is None:
        tolerance = training_tolerance(options.pool_ranks)
    growth: Growth = {}  # the factors by which cuts raised the seconds of the last plan, a first guess for the next

    def scheduled(layout: Layout, direction: Direction, beside: np.ndarray | None = None) -> Plan:
        other = None if options.non_attention is None else other_seconds(options, layout, direction)
        has_rows = layout.q_rows > 0
        if beside is not None:
            other = beside if other is None else beside + other
            has_rows |= beside > 0  # ranks of stages with a window have rows that are not in "layout"
        return schedule(
            layout,
            cost=_with_travel(options, has_rows),
            direction=direction,
            resend=options.resend,
            sinks=options.sinks,
            tolerance=tolerance,
            links=options.links,
            other_seconds=other,
            growth=growth,
        )

    return scheduled


def _with_travel(options: PlanOptions, has_rows: np.ndarray) -> CostModel:
    """Returns the cost model of all servers; ``has_rows`` [R] bool says which have rows of their own in this phase.

    A server without rows of its own waits until rows arrive. A part of the waiting time (``WAITED_FOR`` in
    ``cost/travelling.py``) is added to the seconds of the server's tasks. This holds only if linear layers are balanced
    too, and in pools with a :class:`PoolCost`: pools of unlike servers, or with servers without a model."""
    cost = options.server_cost
    if options.non_attention is None or not isinstance(cost, PoolCost) or has_rows.all():
        return cost
    # far [R] bool: whether rows reach a server over the network, because no rank on the server's node has rows.
    node = options.links.nodes(options.pool_ranks)
    far = np.isin(node, node[has_rows], invert=True)
    rate = np.where(far, options.network_bytes_per_s, options.links.bytes_per_s(far=False))
    return with_travel(cost, has_rows, rate, resend=options.resend, sinks=options.sinks)


def _joined(parts: Sequence[Layout | None], options: PlanOptions, some: Sequence[bool] | None = None) -> Layout:
    """Returns one layout over the ranks of all stages and the servers without a model.

    Documents and ranks are numbered stage by stage: rank r of stage s becomes s · ranks + r.

    Args:
        parts: for each stage, the layout; None for an idle stage.
        some: for each stage, whether its rows are in the result; None for all stages.
    """
    if len(parts) == 1 and parts[0] is not None and not options.servers:
        return parts[0]
    ranks = options.ranks
    q: list[tuple[np.ndarray, ...]] = []
    kv: list[tuple[np.ndarray, ...]] = []
    first: list[np.ndarray] = []
    last: list[np.ndarray] = []
    q_rows, carried_rows = np.zeros((2, options.pool_ranks), np.int64)
    documents = 0
    for stage, layout in enumerate(parts):
        if layout is None:
            continue
        documents += len(layout.first)
        if some is not None and not some[stage]:
            first.append(np.zeros_like(layout.first))
            last.append(np.zeros_like(layout.last))
            continue
        for shards, columns in ((layout.q, q), (layout.kv, kv)):
            document, start, stop, rank, row = shards.columns()
            columns.append((document + documents - len(layout.first), start, stop, rank + stage * ranks, row))
        first.append(layout.first)
        last.append(layout.last)
        here = slice(stage * ranks, (stage + 1) * ranks)
        q_rows[here], carried_rows[here] = layout.q_rows, layout.carried_rows
    nothing = np.empty(0, np.int64)
    return Layout(
        options.pool_ranks,
        np.concatenate((nothing, *first)),
        np.concatenate((nothing, *last)),
        Shards(*(np.concatenate((nothing, *(columns[at] for columns in q))) for at in range(5))),
        Shards(*(np.concatenate((nothing, *(columns[at] for columns in kv))) for at in range(5))),
        q_rows,
        carried_rows,
    )
