"""A step's plan: every phase of every micro-batch, over the ranks of all pipeline stages together.

In a forward phase every stage runs the forward of some micro-batch or nothing, in a backward phase likewise, so the
attention of all ranks in a phase is one pool: a stage that is idle in warm-up or drain serves without own tokens.

With p stages, stage s runs the forward of micro-batch m in forward phase m + s and its backward in backward phase
m + (p − 1) − s; backward phase k runs in the same tick as forward phase k + p − 1. Without pipeline parallelism there
is one stage, and a phase is the forward or the backward of one micro-batch.

Pool ranks are numbered stage by stage: stage · data_parallel + data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from distca.errors import PlanError
from distca.plan.choice import Scheduler, cheaper, once, price_of
from distca.plan.cost.model import CostModel, Direction
from distca.plan.kinds import AttentionKind
from distca.plan.layout import Layout, Shards, lay_out
from distca.plan.metrics import server_seconds, traffic
from distca.plan.micro_batch_dealing import deal_over_micro_batches
from distca.plan.placement import SMALL_POOL
from distca.plan.plan import Plan, fingerprint, plan_at_home
from distca.plan.scheduler.network_cost import Links
from distca.plan.scheduler.scheduler import schedule, training_tolerance
from distca.plan.tasks import Tasks

_WHOLE = 1.05
"""Of the mean rank's work a document may have to stay on one."""
_LONGER = 1.02
"""Than the longest micro-batch may be those that documents are dealt over anew: full ones have room for a few tokens
more, without which no two documents as long as the context go together."""


@dataclass(frozen=True)
class NonAttention:
    """Seconds per row of what a busy rank computes between two attentions of its stage.

    Attributes:
        forward: in a forward phase.
        backward: in a backward phase.
    """

    forward: float
    backward: float


@dataclass(frozen=True)
class PlanOptions:
    """How steps are planned; the same on every rank.

    Attributes:
        ranks: data-parallel ranks of a stage, the homes of its rows.
        cost: seconds per CA-task.
        stages: pipeline stages.
        nano_batches: 1, or 2 for ping and pong.
        align: rows of a nano-batch on a rank are a multiple of this, which is a multiple of ``shares``.
        shares: tensor-parallel ranks that share the rows; 1 without sequence parallelism.
        resend: whether backward has servers of its own; with several stages it has.
        disaggregate: False computes every document at home.
        tolerance: how far above the mean the busiest server may be; None takes the one for the size of the pool.
        links: which servers share a node.
        kinds: of the model's attention layers; layouts level the work of the first.
        costs: seconds per CA-task by kind; none where ``cost`` is that of all.
        layer_kinds: by stage, the number of each of its layers' kind; none where all layers have the first.
        non_attention: levels a phase's linear layers and attention together; None levels attention alone.
        scheduler: plans one nano-batch, in place of the product's scheduler (for tests).

    Raises:
        PlanError: on sizes below 1, or several stages whose servers keep rows for backward.
    """

    ranks: int
    cost: CostModel
    stages: int = 1
    nano_batches: int = 1
    align: int = 1
    shares: int = 1
    resend: bool = False
    disaggregate: bool = True
    tolerance: float | None = None
    links: Links = field(default_factory=Links)
    kinds: tuple[AttentionKind, ...] = (AttentionKind(1.0),)
    costs: tuple[CostModel, ...] = ()
    layer_kinds: tuple[tuple[int, ...], ...] = ()
    non_attention: NonAttention | None = None
    scheduler: Scheduler | None = None

    def __post_init__(self) -> None:
        if min(self.ranks, self.stages) < 1:
            raise PlanError(f"A plan needs at least one rank and one stage, not {self.ranks} and {self.stages}.")
        if self.stages > 1 and self.disaggregate and not self.resend:
            raise PlanError(
                f"backward is keep, but with {self.stages} pipeline stages the server of a forward is busy with other "
                "phases by its backward; set it to auto or resend."
            )
        layers = [len(each) for each in self.layer_kinds]
        if layers and (len(layers) != self.stages or min(layers) != max(layers) or not min(layers)):
            raise PlanError(f"{self.stages} stages need equally many layers each, not {layers}.")

    @cached_property
    def combinations(self) -> tuple[tuple[int, ...], ...]:
        """Which kinds the stages run at the same time: each once, as the number of every stage's kind."""
        return tuple(dict.fromkeys(zip(*self.layer_kinds, strict=True))) or ((0,) * self.stages,)

    @cached_property
    def layer_combinations(self) -> tuple[int, ...]:
        """By layer of a stage, the number of its combination; that of one layer where nothing is known of layers."""
        each = {combination: number for number, combination in enumerate(self.combinations)}
        return tuple(each[layer] for layer in zip(*self.layer_kinds, strict=True)) or (0,)

    @property
    def shares_of_layers(self) -> np.ndarray:
        """[C] which part of a stage's layers have each combination."""
        layers = np.array(self.layer_combinations)
        return np.asarray(np.bincount(layers, minlength=len(self.combinations)) / len(layers))

    @property
    def cost_of_kind(self) -> tuple[CostModel, ...]:
        """Seconds per CA-task by kind."""
        return self.costs or (self.cost,) * len(self.kinds)

    @property
    def windows(self) -> tuple[int, ...]:
        """Keys that a query sees by kind; 0 for all."""
        return tuple(kind.window for kind in self.kinds)

    @property
    def sinks(self) -> bool:
        """Whether layers have sinks; these are in all layers or in none."""
        return any(kind.sink for kind in self.kinds)

    @property
    def pool_ranks(self) -> int:
        """Servers of the pool."""
        return self.stages * self.ranks

    @property
    def keeps(self) -> bool:
        """Servers keep rows and compute the backward of what they computed forward."""
        return self.stages == 1 and not self.resend

    @property
    def stage_node(self) -> int:
        """Consecutive ranks of a stage that share a node; 0 where all do or none, or where stages share nodes
        unevenly."""
        size = self.links.ranks_per_node
        return size if size > 1 and self.ranks % size == 0 else 0

    def pool_rank(self, stage: int, rank: int) -> int:
        """Number in the pool of a stage's data-parallel rank."""
        return stage * self.ranks + rank


@dataclass(frozen=True)
class Phase:
    """One phase, forward or backward.

    Attributes:
        micro_batches: by stage, the micro-batch that it runs; None for an idle stage.
        by_combination: by combination of the stages' kinds and nano-batch, the plan over the whole pool.
    """

    micro_batches: tuple[int | None, ...]
    by_combination: tuple[tuple[Plan, ...], ...]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """By nano-batch, the plan of layers of the first combination."""
        return self.by_combination[0]


@dataclass(frozen=True)
class StepPlan:
    """All phases of one step. Array legend: D documents of a micro-batch.

    Attributes:
        options: how it was planned.
        lengths: by micro-batch, [D] int64 tokens per document.
        homes: by micro-batch, [D] the home rank of every document, or None where documents may span ranks.
        layouts: by micro-batch, its layout of each nano-batch over one stage's data-parallel ranks; the same on all
            stages.
        forward: forward phases in order.
        backward: backward phases in order; with one stage that keeps, their plans are those of the forward phases.
        drawn: by micro-batch, [D, 2] int64: where each of its documents was among those given, by micro-batch and
            number there.
    """

    options: PlanOptions
    lengths: tuple[np.ndarray, ...]
    homes: tuple[np.ndarray | None, ...]
    layouts: tuple[tuple[Layout, ...], ...]
    forward: tuple[Phase, ...]
    backward: tuple[Phase, ...]
    drawn: tuple[np.ndarray, ...]

    @property
    def phases(self) -> list[tuple[Direction, Phase]]:
        """All forward phases, then all backward phases."""
        return [("forward", phase) for phase in self.forward] + [("backward", phase) for phase in self.backward]

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(sum(lengths.sum() for lengths in self.lengths))

    @property
    def fingerprint(self) -> int:
        """Of all plans; the same on ranks that planned the same."""
        return fingerprint(plan for _, phase in self.phases for plans in phase.by_combination for plan in plans)

    def forward_phase(self, micro_batch: int, stage: int) -> int:
        """The forward phase in which ``stage`` runs ``micro_batch``."""
        return micro_batch + stage

    def backward_phase(self, micro_batch: int, stage: int) -> int:
        """The backward phase in which ``stage`` runs ``micro_batch``."""
        return micro_batch + self.options.stages - 1 - stage

    def order(self) -> Iterator[tuple[Literal["forward", "backward"], int]]:
        """All phases as they run. A backward phase runs as soon as the last stage has its micro-batch's forward behind
        it: no other order keeps fewer micro-batches in flight, on any stage (docs/architecture.md)."""
        last = self.options.stages - 1
        for tick in range(len(self.forward) + last):
            if tick < len(self.forward):
                yield "forward", tick
            if tick >= last:
                yield "backward", tick - last

    def seconds_before(self) -> np.ndarray:
        """[P, R] attention seconds of one layer with documents in order, computed at home."""
        in_order = [_lay_out(self.options, *each) for each in zip(self.lengths, self.homes, strict=True)]
        forward, backward = _phases(in_order, self.options, _at_home)
        before = replace(self, forward=forward, backward=backward)
        return np.stack([_seconds(phase, self.options, direction) for direction, phase in before.phases])

    def balance(self) -> StepBalance:
        """What the plan achieves; costs about as much as planning did."""
        options, phases = self.options, self.phases
        return StepBalance(
            self.seconds_before(),
            np.stack([_seconds(phase, options, direction) for direction, phase in phases]),
            np.stack(
                [
                    np.sum([other_seconds(options, plan.layout, direction) for plan in phase.plans], axis=0)
                    for direction, phase in phases
                ]
            ),
            round(sum(_bytes(phase, options, direction) for direction, phase in phases)),
        )


@dataclass(frozen=True)
class StepBalance:
    """How level a step's phases are. Array legend: P phases, all forward ones first, R ranks of the pool. Figures of
    one layer are the mean over a stage's layers, which may be of several kinds.

    Attributes:
        seconds_before: [P, R] attention seconds of one layer with documents in order, computed at home.
        seconds_after: [P, R] the same as planned.
        other_seconds: [P, R] non-attention seconds of one layer that plans count; 0 where they level attention alone.
        bytes_moved: bytes that travel for one layer of every stage in the whole step.
    """

    seconds_before: np.ndarray
    seconds_after: np.ndarray
    other_seconds: np.ndarray
    bytes_moved: int


def plan_step(
    lengths: Sequence[Sequence[int] | np.ndarray],
    options: PlanOptions,
    homes: Sequence[Sequence[int] | np.ndarray | None] | None = None,
    room: Sequence[int] | np.ndarray | None = None,
) -> StepPlan:
    """Plan a step from its documents' lengths; deterministic, so every rank gets the same answer.

    Args:
        lengths: by micro-batch, tokens per document.
        options: how to plan.
        homes: by micro-batch, the home rank of every document, for documents that stay whole; None lets them span
            ranks.
        room: by micro-batch, most tokens; the step's documents are then dealt over its micro-batches anew, and
            ``StepPlan.drawn`` says which went where. None leaves them where they are, as does room in which whole
            documents, longest first, do not find a place.

    Raises:
        PlanError: on no micro-batch, lengths that cannot be laid out, or room for other micro-batches.
    """
    if not len(lengths):
        raise PlanError("A step has at least one micro-batch, and this one has none.")
    rows = tuple(np.asarray(each, np.int64).reshape(-1) for each in lengths)
    drawn = tuple(np.stack((np.full(len(each), at), np.arange(len(each))), axis=1) for at, each in enumerate(rows))
    if room is not None:
        if homes is not None:
            raise PlanError("Documents with homes stay in their micro-batches: give homes or room, not both.")
        if len(room) != len(rows):
            raise PlanError(f"room is for {len(room)} micro-batches, and the step has {len(rows)}.")
        flat, origin = np.concatenate(rows), np.concatenate(drawn)
        # No micro-batch should get much longer than the longest was, if that can be.
        longest = np.minimum(int(_LONGER * max(int(each.sum()) for each in rows)), room)
        deal = partial(deal_over_micro_batches, flat, stages=options.stages)
        chosen = deal(longest) or deal(room)
        if chosen is not None:
            rows, drawn = tuple(flat[each] for each in chosen), tuple(origin[each] for each in chosen)
    places = tuple(
        None if home is None else np.asarray(home, np.int64)
        for home in (homes if homes is not None else [None] * len(rows))
    )
    scheduler = once((options.scheduler or _scheduler(options)) if options.disaggregate else _at_home)
    layouts = tuple(_laid_out(options, *each, scheduler) for each in zip(rows, places, strict=True))
    return StepPlan(options, rows, places, layouts, *_phases(layouts, options, scheduler), drawn=drawn)


def other_seconds(options: PlanOptions, layout: Layout, direction: Direction) -> np.ndarray:
    """[R] non-attention seconds of one layer and nano-batch; 0 where attention alone is levelled."""
    each = options.non_attention
    per_row = 0.0 if each is None else each.forward if direction == "forward" else each.backward
    return per_row * layout.q_rows


def _laid_out(
    options: PlanOptions, lengths: np.ndarray, homes: np.ndarray | None, scheduler: Scheduler
) -> tuple[Layout, ...]:
    # Idle stages of a pipeline can only take over what attention a half has.
    dealing = "lean" if options.stages == 1 else "even"
    laid = partial(_lay_out, options, lengths, homes, nano_batches=options.nano_batches, dealing=dealing)
    if not options.disaggregate or homes is not None:
        return laid()
    together = partial(laid, placement="spread", cost=options.cost, ranks_per_node=options.stage_node)
    by_half = partial(laid, placement="spread_by_half", cost=options.cost)
    if options.ranks > SMALL_POOL:
        return together()
    if options.ranks == 1:
        return by_half()

    def planned(layout: Layout) -> tuple[Plan, Plan]:
        forward = scheduler(layout, "both" if options.keeps else "forward")
        return forward, forward if options.keeps else scheduler(layout, "backward")

    price = partial(price_of, cost=options.cost, links=options.links, resend=options.resend)
    work = options.cost.per_direction("both", lengths, lengths)
    whole = bool((work.max(axis=1, initial=0.0) <= work.sum(axis=1) * _WHOLE / options.ranks).all())
    return cheaper(by_half, together, planned, price, whole)


def _lay_out(options: PlanOptions, lengths: np.ndarray, homes: np.ndarray | None, **how: Any) -> tuple[Layout, ...]:
    """By default the layout, in one piece, that plain packing of the documents has."""
    return lay_out(lengths, options.ranks, rank_of=homes, align=options.align, **how)


def _phases(
    layouts: Sequence[tuple[Layout, ...]], options: PlanOptions, scheduler: Scheduler
) -> tuple[tuple[Phase, ...], tuple[Phase, ...]]:
    """All forward phases, and all backward phases."""
    stages, keeps = options.stages, options.keeps

    def phase(number: int, direction: Direction) -> Phase:
        due = [number - (stages - 1 - stage if direction == "backward" else stage) for stage in range(stages)]
        running = tuple(m if 0 <= m < len(layouts) else None for m in due)
        halves = [[None if m is None else layouts[m][nano] for m in running] for nano in range(len(layouts[0]))]
        return Phase(
            running,
            tuple(_of_combination(each, halves, options, direction, scheduler) for each in options.combinations),
        )

    numbers = range(len(layouts) + stages - 1)
    forward = tuple(phase(number, "both" if keeps else "forward") for number in numbers)
    # Servers that keep rows compute the backward of what they computed forward.
    return forward, forward if keeps else tuple(phase(number, "backward") for number in numbers)


def _of_combination(
    kinds: Sequence[int],
    halves: Sequence[Sequence[Layout | None]],
    options: PlanOptions,
    direction: Direction,
    scheduler: Scheduler,
) -> tuple[Plan, ...]:
    """By nano-batch, the plan of a phase's layers of some ``kinds`` by stage. Layers with a window are computed at
    home, where their work is about level; those without are scheduled over all servers, beside what these have of
    windows."""
    windows = [options.kinds[kind].window for kind in kinds]
    if not any(windows):
        plans = [
            _with_kinds(scheduler(_joined(half, options.ranks), direction), half, kinds, options) for half in halves
        ]
        if options.keeps:  # what servers keep for backward is there for the next half too
            plans[1:] = [replace(plan, before=before.tasks) for before, plan in pairwise(plans)]
        return tuple(plans)
    plans = []
    for half in halves:
        seen = [layout and layout.within(window) for layout, window in zip(half, windows, strict=True)]
        home = _with_kinds(plan_at_home(_joined(seen, options.ranks)), half, kinds, options)
        if all(windows):
            plans.append(home)
            continue
        full = np.repeat([not window for window in windows], options.ranks)
        rest = home.tasks.take(~full[home.tasks.server])
        beside = server_seconds(replace(home, tasks=rest), options.cost_of_kind, direction)
        beside += np.where(full, 0.0, other_seconds(options, home.layout, direction))
        scheduled = scheduler(_joined(half, options.ranks, [not window for window in windows]), direction, beside).tasks
        columns = (np.concatenate(pair) for pair in zip(scheduled.columns(), rest.columns(), strict=True))
        plans.append(replace(home, tasks=Tasks.sorted(*columns)))
    return tuple(plans)


def _with_kinds(plan: Plan, half: Sequence[Layout | None], kinds: Sequence[int], options: PlanOptions) -> Plan:
    """The plan, which then knows the kind of layer of every document."""
    if not any(kinds) and not any(options.windows):
        return plan
    documents = [0 if layout is None else len(layout.first) for layout in half]
    windows = tuple(window if number in kinds else 0 for number, window in enumerate(options.windows))
    return replace(plan, windows=windows, kind=np.repeat(np.asarray(kinds, np.int64), documents))


def _at_home(layout: Layout, direction: Direction, beside: np.ndarray | None = None) -> Plan:
    return plan_at_home(layout)


def _scheduler(options: PlanOptions) -> Scheduler:
    tolerance = options.tolerance
    if tolerance is None:
        tolerance = training_tolerance(options.pool_ranks)

    def scheduled(layout: Layout, direction: Direction, beside: np.ndarray | None = None) -> Plan:
        other = None if options.non_attention is None else other_seconds(options, layout, direction)
        if beside is not None:
            other = beside if other is None else beside + other
        return schedule(
            layout,
            cost=options.cost,
            direction=direction,
            resend=options.resend,
            tolerance=tolerance,
            links=options.links,
            other_seconds=other,
        )

    return scheduled


def _seconds(phase: Phase, options: PlanOptions, direction: Direction) -> np.ndarray:
    """[R] seconds of one layer, in the mean over a stage's layers."""
    return np.asarray(
        sum(
            share * np.sum([server_seconds(plan, options.cost_of_kind, direction) for plan in plans], axis=0)
            for share, plans in zip(options.shares_of_layers.tolist(), phase.by_combination, strict=True)
        )
    )


def _bytes(phase: Phase, options: PlanOptions, direction: Direction) -> float:
    q_bytes, kv_bytes = options.cost.shape.moved_bytes(direction, options.resend, options.sinks)
    total = 0.0
    for share, plans in zip(options.shares_of_layers.tolist(), phase.by_combination, strict=True):
        rows = [traffic(plan) for plan in plans]
        total += share * sum(each.q_rows * q_bytes + each.kv_rows * kv_bytes for each in rows)
    return total


def _joined(parts: Sequence[Layout | None], ranks: int, some: Sequence[bool] | None = None) -> Layout:
    """One layout over the ranks of all stages; idle stages have no rows, nor have those that are not among ``some``.
    Documents are numbered stage by stage."""
    if len(parts) == 1 and parts[0] is not None:
        return parts[0]
    q: list[tuple[np.ndarray, ...]] = []
    kv: list[tuple[np.ndarray, ...]] = []
    first: list[np.ndarray] = []
    last: list[np.ndarray] = []
    q_rows = np.zeros(len(parts) * ranks, np.int64)
    carried_rows = np.zeros(len(parts) * ranks, np.int64)
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
        len(parts) * ranks,
        np.concatenate((nothing, *first)),
        np.concatenate((nothing, *last)),
        Shards(*(np.concatenate((nothing, *(columns[at] for columns in q))) for at in range(5))),
        Shards(*(np.concatenate((nothing, *(columns[at] for columns in kv))) for at in range(5))),
        q_rows,
        carried_rows,
    )
