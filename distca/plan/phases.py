"""The phases of a step: in each, what all stages run at the same time, and the plans of their layers, by kind.

A phase has a plan for each *combination*: the kinds of layers that the stages compute at the same time. Example: stage
0 has layers with and without a window in turn, and stage 1 has none with a window. Then layers of the combination
(window, full) have one plan, and those of (full, full) another.
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
    """One phase, forward or backward.

    Attributes:
        micro_batches: by stage, the micro-batch that it runs; None for an idle stage.
        by_combination: by combination and nano-batch, the plan over the whole pool.
    """

    micro_batches: tuple[int | None, ...]
    by_combination: tuple[tuple[Plan, ...], ...]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each nano-batch, for layers of the first combination."""
        return self.by_combination[0]


def other_seconds(options: PlanOptions, layout: Layout, direction: Direction) -> np.ndarray:
    """[R] seconds of one layer and nano-batch in linear layers, [2, R] for both directions; 0 where plans level
    attention alone."""
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
    """All forward phases, and all backward phases."""
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
    # Servers that keep rows compute the backward of what they computed forward.
    return forward, forward if keeps else tuple(phase(number, "backward") for number in numbers)


def _of_combination(
    kinds: Sequence[int],
    nanos: Sequence[Sequence[Layout | None]],
    options: PlanOptions,
    direction: Direction,
    scheduler: Scheduler,
) -> tuple[Plan, ...]:
    """Returns a plan for each nano-batch of a phase, for the layers that have these ``kinds`` by stage.

    Layers with a window are computed at home, where their work is about level. Layers without one are scheduled over
    all servers, beside the work that servers have with windows.

    Args:
        kinds: by stage, the number of the layers' kind.
        nanos: by nano-batch and stage, the layout; None for an idle stage.
        options: how to plan.
        direction: what the plans are for.
        scheduler: plans one nano-batch.
    """
    windows = [options.kinds[kind].window for kind in kinds]
    if not any(windows):
        plans = [_with_kinds(scheduler(_joined(nano, options), direction), nano, kinds, options) for nano in nanos]
        if options.keeps:  # rows that servers keep for backward are there for the next nano-batch too
            plans[1:] = [replace(plan, before=before.tasks) for before, plan in pairwise(plans)]
        return tuple(plans)
    plans = []
    for nano in nanos:
        seen = [layout and layout.within(window) for layout, window in zip(nano, windows, strict=True)]
        home = _with_kinds(plan_at_home(_joined(seen, options)), nano, kinds, options)
        if all(windows):
            plans.append(home)
            continue
        # "full" are the ranks of stages without a window, and servers without a model; the others' tasks stay ("rest").
        # They count as work beside when the tasks of "full" ranks are scheduled. Both make one plan.
        full = np.repeat([not window for window in windows], options.ranks)
        full = np.append(full, np.ones(options.servers, bool))
        rest = home.tasks.take(~full[home.tasks.server])
        beside = server_seconds(replace(home, tasks=rest), options.cost_of_kind, direction)
        beside += np.where(full, 0.0, other_seconds(options, home.layout, direction))
        scheduled = scheduler(_joined(nano, options, [not window for window in windows]), direction, beside).tasks
        columns = (np.concatenate(pair) for pair in zip(scheduled.columns(), rest.columns(), strict=True))
        plans.append(replace(home, tasks=Tasks.sorted(*columns)))
    return tuple(plans)


def _with_kinds(plan: Plan, nano: Sequence[Layout | None], kinds: Sequence[int], options: PlanOptions) -> Plan:
    """The plan of a nano-batch, which then knows the kind of layer of every document."""
    if not any(kinds) and not any(options.windows):
        return plan
    documents = [0 if layout is None else len(layout.first) for layout in nano]
    windows = tuple(window if number in kinds else 0 for number, window in enumerate(options.windows))
    return replace(plan, windows=windows, kind=np.repeat(np.asarray(kinds, np.int64), documents))


def at_home(layout: Layout, direction: Direction, beside: np.ndarray | None = None) -> Plan:
    """A scheduler that leaves every row at home; arguments as in :class:`distca.plan.choice.Scheduler`."""
    return plan_at_home(layout)


def scheduler_of(options: PlanOptions) -> Scheduler:
    """The product's scheduler with the tolerance, costs and other work that ``options`` say."""
    tolerance = options.tolerance
    if tolerance is None:
        tolerance = training_tolerance(options.pool_ranks)
    growth: Growth = {}  # what each plan learns for the next one; it begins anew with every step

    def scheduled(layout: Layout, direction: Direction, beside: np.ndarray | None = None) -> Plan:
        other = None if options.non_attention is None else other_seconds(options, layout, direction)
        if beside is not None:
            other = beside if other is None else beside + other
        return schedule(
            layout,
            cost=_with_travel(options, layout),
            direction=direction,
            resend=options.resend,
            tolerance=tolerance,
            links=options.links,
            other_seconds=other,
            growth=growth,
        )

    return scheduled


def _with_travel(options: PlanOptions, layout: Layout) -> CostModel:
    """Seconds per CA-task by server.

    A server without rows of its own has nothing to do until its tasks' rows arrive. Where servers are not alike and
    plans level all of a phase's time, its costs include that wait."""
    cost, has_rows = options.server_cost, layout.q_rows > 0
    if options.non_attention is None or not isinstance(cost, PoolCost) or has_rows.all():
        return cost
    node = options.links.nodes(options.pool_ranks)
    far = np.isin(node, node[has_rows], invert=True)
    rate = np.where(far, options.network_bytes_per_s, options.links.bytes_per_s(far=False))
    return with_travel(cost, has_rows, rate, resend=options.resend, sinks=options.sinks)


def _joined(parts: Sequence[Layout | None], options: PlanOptions, some: Sequence[bool] | None = None) -> Layout:
    """One layout over the whole pool: the ranks of all stages, and the servers without a model.

    Idle stages have no rows, nor have stages that are not among ``some`` (by stage; None for all). Documents and ranks
    are numbered stage by stage: rank r of stage s is number s · ranks + r."""
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
