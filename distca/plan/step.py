"""The plan of a step: for all its micro-batches, which rank holds each row, and which rank computes its attention.

Each rank holds rows of documents, as their *home*, and computes attention, as a *server*. In a *phase*, each pipeline
stage runs the forward of some micro-batch, or each runs the backward of some micro-batch; a stage may be idle. In a
phase any server may compute attention of any stage. So idle stages, at the start and the end of a step, help other
stages. Without pipeline stages a phase is the forward or the backward of one micro-batch.

Stage s runs the forward of micro-batch m in forward phase m + s. With p stages it runs the backward of m in backward
phase m + (p − 1) − s. Backward phase k runs right after forward phase k + p − 1.

Ranks are numbered stage by stage: stage · data_parallel + data-parallel rank. Servers without a model come last. Every
training process plans by itself, and gets the same plan from the same lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from distca.errors import PlanError
from distca.plan.choice import Scheduler, cheaper, once, price_of
from distca.plan.cost.model import Direction
from distca.plan.layout import Layout
from distca.plan.metrics import seconds_by_kind, traffic
from distca.plan.options import PlanOptions
from distca.plan.phases import Phase, at_home, other_seconds, plan_phases, scheduler_of
from distca.plan.place.lay_out import lay_out
from distca.plan.place.micro_batches import deal_over_micro_batches
from distca.plan.place.shares import SMALL_POOL
from distca.plan.plan import Plan, fingerprint

_WHOLE = 1.05
"""If a document has more work than this multiple of the mean rank's, rows must move in any placement
(:func:`distca.plan.choice.cheaper`)."""
_LONGER = 1.02
"""If documents are dealt over micro-batches anew, a micro-batch may have this many times the tokens of the longest
micro-batch before. Otherwise two documents as long as the context would not fit together."""


@dataclass(frozen=True)
class StepPlan:
    """All phases of one step. Array legend: D documents of a micro-batch, P phases, R ranks, K kinds of attention
    layers.

    A micro-batch is computed as one or two *nano-batches*: the transfers of one run beside the computation of the
    other.

    Attributes:
        options: how the step was planned.
        lengths: for each micro-batch, [D] int64 tokens per document.
        homes: for each micro-batch, [D] the home rank of every document, or None if documents may span ranks.
        layouts: for each micro-batch and nano-batch, the home and row of every token. Homes are the data-parallel ranks
            of one stage; all stages have the same layout.
        forward: forward phases in order.
        backward: backward phases in order. If servers keep rows for backward, these are the forward phases.
        drawn: for each micro-batch, [D, 2] int64 where each document came from: the micro-batch in which it was given,
            and its index there.
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
        """Returns all forward phases, then all backward phases."""
        return [("forward", phase) for phase in self.forward] + [("backward", phase) for phase in self.backward]

    @property
    def tokens(self) -> int:
        """Returns the tokens of all documents together."""
        return int(sum(lengths.sum() for lengths in self.lengths))

    @property
    def fingerprint(self) -> int:
        """Returns a checksum of all plans; equal plans have equal checksums."""
        return fingerprint(plan for _, phase in self.phases for plans in phase.by_combination for plan in plans)

    def forward_phase(self, micro_batch: int, stage: int) -> int:
        """Returns the forward phase in which ``stage`` runs ``micro_batch``."""
        return micro_batch + stage

    def backward_phase(self, micro_batch: int, stage: int) -> int:
        """Returns the backward phase in which ``stage`` runs ``micro_batch``."""
        return micro_batch + self.options.stages - 1 - stage

    def order(self) -> Iterator[tuple[Literal["forward", "backward"], int]]:
        """Yields all phases in the order in which they run.

        A backward phase runs as soon as the last stage has finished its micro-batch's forward."""
        last = self.options.stages - 1
        for tick in range(len(self.forward) + last):
            if tick < len(self.forward):
                yield "forward", tick
            if tick >= last:
                yield "backward", tick - last

    def seconds_before(self) -> np.ndarray:
        """Returns [P, R] attention seconds of one layer, if documents lie one after the other and are computed at
        home."""
        return np.asarray(self._in_order().seconds_by_kind().sum(axis=0))

    def seconds_by_kind(self) -> np.ndarray:
        """Returns [K, P, R] attention seconds of one layer as planned, for each kind."""
        return np.stack([_seconds(phase, self.options, direction) for direction, phase in self.phases], axis=1)

    def _in_order(self) -> StepPlan:
        """Returns the step with documents one after the other, computed at home."""
        in_order = [_lay_out(self.options, *each) for each in zip(self.lengths, self.homes, strict=True)]
        forward, backward = plan_phases(in_order, self.options, at_home)
        return replace(self, forward=forward, backward=backward)

    def of_combination(self, number: int) -> StepPlan:
        """Returns the same step of a model whose layers all have one combination.

        A *combination* is the kinds of layers that the stages run at the same time; ``number`` is an index of
        ``options.combinations``."""
        options = self.options
        layers = tuple((kind,) for kind in options.combinations[number]) if options.layer_kinds else ()
        forward, backward = (
            tuple(replace(phase, by_combination=(phase.by_combination[number],)) for phase in phases)
            for phases in (self.forward, self.backward)
        )
        return replace(self, options=replace(options, layer_kinds=layers), forward=forward, backward=backward)

    def balance(self) -> StepBalance:
        """Returns how level the plan is; this takes about as long as planning."""
        options, phases = self.options, self.phases
        return StepBalance(
            self._in_order().seconds_by_kind(),
            self.seconds_by_kind(),
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
    """How level the phases of a step are. Array legend: P phases (forward, then backward), R ranks, K kinds of
    attention layers.

    Seconds and bytes of one layer are the mean over a stage's layers, which may be of several kinds.

    Attributes:
        before_by_kind: [K, P, R] attention seconds of one layer, if documents lie one after the other and are computed
            at home.
        after_by_kind: [K, P, R] attention seconds of one layer as planned.
        other_seconds: [P, R] seconds of linear layers that plans count for one layer; 0 if plans level attention alone.
        bytes_moved: bytes that travel in the whole step for one layer of every stage.
    """

    before_by_kind: np.ndarray
    after_by_kind: np.ndarray
    other_seconds: np.ndarray
    bytes_moved: int

    @cached_property
    def seconds_before(self) -> np.ndarray:
        """Returns [P, R] seconds before, for all kinds together."""
        return np.asarray(self.before_by_kind.sum(axis=0))

    @cached_property
    def seconds_after(self) -> np.ndarray:
        """Returns [P, R] seconds as planned, for all kinds together."""
        return np.asarray(self.after_by_kind.sum(axis=0))


def plan_step(
    lengths: Sequence[Sequence[int] | np.ndarray],
    options: PlanOptions,
    homes: Sequence[Sequence[int] | np.ndarray | None] | None = None,
    room: Sequence[int] | np.ndarray | None = None,
) -> StepPlan:
    """Plans a step from its documents' lengths; the same arguments always give the same plan.

    Args:
        lengths: for each micro-batch, tokens per document.
        options: how to plan.
        homes: for each micro-batch, the home rank of every document, if documents must stay whole; None lets documents
            span ranks.
        room: for each micro-batch, most tokens. Documents are then dealt over the micro-batches anew, and
            ``StepPlan.drawn`` says where they came from. None leaves documents in their micro-batches, as does a room
            that is too small for all documents.

    Raises:
        PlanError: there is no micro-batch; lengths cannot be laid out; ``room`` has another number of micro-batches; or
            both ``room`` and ``homes`` are given.
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
        # Documents are dealt into a little more tokens than the longest micro-batch had, or else into all of the room.
        longest = np.minimum(int(_LONGER * max(int(each.sum()) for each in rows)), room)
        deal = partial(deal_over_micro_batches, flat, stages=options.stages)
        chosen = deal(longest) or deal(room)
        if chosen is not None:
            rows, drawn = tuple(flat[each] for each in chosen), tuple(origin[each] for each in chosen)
    places = tuple(
        None if home is None else np.asarray(home, np.int64)
        for home in (homes if homes is not None else [None] * len(rows))
    )
    scheduler = once((options.scheduler or scheduler_of(options)) if options.disaggregate else at_home)
    layouts = tuple(_laid_out(options, *each, scheduler) for each in zip(rows, places, strict=True))
    return StepPlan(options, rows, places, layouts, *plan_phases(layouts, options, scheduler), drawn=drawn)


def _laid_out(
    options: PlanOptions, lengths: np.ndarray, homes: np.ndarray | None, scheduler: Scheduler
) -> tuple[Layout, ...]:
    """Returns the layouts of one micro-batch.

    The placement of documents depends on the number of ranks, and in small pools on the price of plans."""
    # An idle stage can help only with attention of the present nano-batch. So with stages both nano-batches get about
    # as much attention.
    dealing = "lean" if options.stages == 1 else "even"
    laid = partial(_lay_out, options, lengths, homes, nano_batches=options.nano_batches, dealing=dealing)
    if not options.disaggregate or homes is not None:
        return laid()
    together = partial(laid, placement="spread", cost=options.cost, ranks_per_node=options.stage_node)
    by_nano_batch = partial(laid, placement="spread_by_nano_batch", cost=options.cost)
    if options.ranks == 1:
        return by_nano_batch()
    if options.ranks > SMALL_POOL or options.servers:  # with servers without a model, most rows travel anyway
        return together()

    def planned(layout: Layout) -> tuple[Plan, Plan]:
        forward = scheduler(layout, "both" if options.keeps else "forward")
        return forward, forward if options.keeps else scheduler(layout, "backward")

    price = partial(price_of, cost=options.cost, links=options.links, resend=options.resend)
    work = options.cost.per_direction("both", lengths, lengths)
    whole = bool((work.max(axis=1, initial=0.0) <= work.sum(axis=1) * _WHOLE / options.ranks).all())
    return cheaper(by_nano_batch, together, planned, price, whole)


def _lay_out(options: PlanOptions, lengths: np.ndarray, homes: np.ndarray | None, **how: Any) -> tuple[Layout, ...]:
    """Returns the layouts of documents; by default one layout, with documents one after the other."""
    return lay_out(lengths, options.ranks, rank_of=homes, align=options.align, **how)


def _seconds(phase: Phase, options: PlanOptions, direction: Direction) -> np.ndarray:
    """Returns [K, R] attention seconds of a phase in one layer, for each kind, as the mean over a stage's layers."""
    return np.asarray(
        sum(
            share * np.sum([seconds_by_kind(plan, options.cost_of_kind, direction) for plan in plans], axis=0)
            for share, plans in zip(options.shares_of_layers.tolist(), phase.by_combination, strict=True)
        )
    )


def _bytes(phase: Phase, options: PlanOptions, direction: Direction) -> float:
    """Returns the bytes that travel in a phase for one layer, as the mean over a stage's layers."""
    q_bytes, kv_bytes = options.cost.shape.moved_bytes(direction, options.resend, options.sinks)
    total = 0.0
    for share, plans in zip(options.shares_of_layers.tolist(), phase.by_combination, strict=True):
        rows = [traffic(plan) for plan in plans]
        total += share * sum(each.q_rows * q_bytes + each.kv_rows * kv_bytes for each in rows)
    return total
