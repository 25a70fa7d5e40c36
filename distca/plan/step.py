"""Plans a step: which rank holds each row (token) of its micro-batches, and which computes each row's attention.

The *home* of a row is the rank that holds the row. A *server* is a rank that computes attention. A step is a list of
*phases*. In a forward phase, each pipeline stage runs the forward of a micro-batch, or is idle. In a backward phase,
each stage runs the backward of a micro-batch, or is idle. In each phase, any rank may be a server for any stage.

With p stages, backward phase k runs right after forward phase k + p − 1. The last p − 1 backward phases have no such
forward phase, and run at the end. With n data-parallel ranks in a stage, rank r of stage s has number s · n + r.
Servers without a model have the last numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from distca.errors import PlanError
from distca.plan.choice import Once, Price, cheaper, is_level_at_home, price_of
from distca.plan.cost.model import Direction
from distca.plan.cost.pool import PoolCost
from distca.plan.layout import Layout
from distca.plan.metrics import seconds_by_kind, traffic
from distca.plan.options import PlanOptions
from distca.plan.phases import Phase, at_home, other_seconds, plan_phases, scheduler_of, with_kept_rows
from distca.plan.place.lay_out import lay_out
from distca.plan.place.micro_batches import deal_over_micro_batches
from distca.plan.place.shares import SMALL_POOL
from distca.plan.plan import Plan, fingerprint

_WHOLE = 1.05
"""A document is long if its attention takes more than this many times the mean seconds of a rank. Rows of long
documents travel in any placement. So with a long document, if no rank waits for transfers, a second placement is not
tried (``none_is_long`` in ``choice.py``). Values from 1.01 to 1.2 give about equal plans
(benchmarks/results/planner_constants.json)."""
_LONGER = 1.02
"""If :func:`plan_step` moves documents between micro-batches, a micro-batch gets at most this factor times the tokens
of the largest micro-batch that was given. If documents do not fit so, the limit is ``room``."""


@dataclass(frozen=True)
class StepPlan:
    """All phases of one step.

    A micro-batch is computed in one or two parts, the *nano-batches* ping and pong. Array legend: D documents of a
    micro-batch, P phases, R ranks, K kinds of attention layers, for example with and without a window.

    Attributes:
        lengths: for each micro-batch, [D] int64 tokens per document.
        homes: for each micro-batch, [D] home rank of every document; None if documents may be on several ranks.
        layouts: for each micro-batch and nano-batch, the data-parallel rank and row of every token; the same in all
            stages.
        forward, backward: phases in order.
        drawn: for each micro-batch, [D, 2] int64: for each document, the micro-batch and the index that it had in the
            ``lengths`` of :func:`plan_step`.
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
        return [("forward", phase) for phase in self.forward] + [("backward", phase) for phase in self.backward]

    @property
    def tokens(self) -> int:
        return int(sum(lengths.sum() for lengths in self.lengths))

    @property
    def fingerprint(self) -> int:
        """Returns a checksum of all plans; equal plans have equal checksums."""
        return fingerprint(plan for _, phase in self.phases for plans in phase.by_combination for plan in plans)

    def forward_phase(self, micro_batch: int, stage: int) -> int:
        return micro_batch + stage

    def backward_phase(self, micro_batch: int, stage: int) -> int:
        return micro_batch + self.options.stages - 1 - stage

    def order(self) -> Iterator[tuple[Literal["forward", "backward"], int]]:
        """Yields the direction and number of every phase, in the order in which phases run."""
        last = self.options.stages - 1
        for tick in range(len(self.forward) + last):
            if tick < len(self.forward):
                yield "forward", tick
            if tick >= last:
                yield "backward", tick - last

    def seconds_before(self) -> np.ndarray:
        """Returns [P, R] attention seconds of one layer, as the mean over a stage's layers, without balancing.

        Without balancing, documents are on their ``homes``, or one after the other if they have none. Every rank
        computes its own rows. Documents that moved to another micro-batch are counted there."""
        return np.asarray(self._in_order().seconds_by_kind().sum(axis=0))

    def seconds_by_kind(self) -> np.ndarray:
        """Returns [K, P, R] each kind's part of one layer's attention seconds, as the mean over a stage's layers."""
        return np.stack([_seconds(phase, self.options, direction) for direction, phase in self.phases], axis=1)

    def _in_order(self) -> StepPlan:
        in_order = [_lay_out(self.options, *each) for each in zip(self.lengths, self.homes, strict=True)]
        forward, backward = plan_phases(in_order, self.options, at_home)
        return replace(self, forward=forward, backward=backward)

    def of_combination(self, number: int) -> StepPlan:
        """Returns the same step for a model in which all layers of stage s have one kind of attention.

        This kind is ``options.combinations[number][s]``."""
        options = self.options
        layers = tuple((kind,) for kind in options.combinations[number]) if options.layer_kinds else ()
        forward, backward = (
            tuple(replace(phase, by_combination=(phase.by_combination[number],)) for phase in phases)
            for phases in (self.forward, self.backward)
        )
        return replace(self, options=replace(options, layer_kinds=layers), forward=forward, backward=backward)

    def balance(self) -> StepBalance:
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
    """The seconds of every rank with and without balancing, and the bytes that travel between ranks.

    All values are for one layer of each stage, as the mean over the stage's layers. Array legend: P phases (forward,
    then backward), R ranks, K kinds of attention layers.

    Attributes:
        before_by_kind: [K, P, R] each kind's part of the attention seconds without balancing
            (:meth:`StepPlan.seconds_before`).
        after_by_kind: [K, P, R] each kind's part of the attention seconds as planned.
        other_seconds: [P, R] seconds of linear layers; 0 if plans balance only attention.
        bytes_moved: bytes in all phases together.
    """

    before_by_kind: np.ndarray
    after_by_kind: np.ndarray
    other_seconds: np.ndarray
    bytes_moved: int

    @cached_property
    def seconds_before(self) -> np.ndarray:
        return np.asarray(self.before_by_kind.sum(axis=0))

    @cached_property
    def seconds_after(self) -> np.ndarray:
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
        homes: for each micro-batch, the home rank of every document, if documents must stay whole on these ranks. None
            if a document may be on several ranks.
        room: for each micro-batch, the most tokens. If given, documents may move to other micro-batches
            (``StepPlan.drawn``). With None, or if they do not fit into ``room``, no document moves.

    Raises:
        PlanError: there is no micro-batch; a document has no tokens; ``homes`` or ``room`` has a wrong length or value;
            or both are given.
    """
    if not len(lengths):
        raise PlanError("A step has at least one micro-batch, and this one has none.")
    if homes is not None and len(homes) != len(lengths):
        raise PlanError(f"homes are for {len(homes)} micro-batches, and the step has {len(lengths)}.")
    rows = tuple(np.asarray(each, np.int64).reshape(-1) for each in lengths)
    drawn = tuple(np.stack((np.full(len(each), at), np.arange(len(each))), axis=1) for at, each in enumerate(rows))
    if room is not None:
        if homes is not None:
            raise PlanError("Documents with homes stay in their micro-batches: give homes or room, not both.")
        if len(room) != len(rows):
            raise PlanError(f"room is for {len(room)} micro-batches, and the step has {len(rows)}.")
        flat, origin = np.concatenate(rows), np.concatenate(drawn)
        most = np.minimum(int(_LONGER * max(int(each.sum()) for each in rows)), room)
        deal = partial(deal_over_micro_batches, flat, stages=options.stages)
        chosen = deal(most) or deal(room)
        if chosen is not None:
            rows, drawn = tuple(flat[each] for each in chosen), tuple(origin[each] for each in chosen)
    places = tuple(
        None if home is None else np.asarray(home, np.int64)
        for home in (homes if homes is not None else [None] * len(rows))
    )
    scheduler, alone = _scheduler(options), _of_one_stage(options)
    of_stage = scheduler if alone is options else _scheduler(alone)
    layouts = tuple(_laid_out(alone, *each, of_stage) for each in zip(rows, places, strict=True))
    return StepPlan(options, rows, places, layouts, *plan_phases(layouts, options, scheduler), drawn=drawn)


def _scheduler(options: PlanOptions) -> Once:
    return Once((options.scheduler or scheduler_of(options)) if options.disaggregate else at_home)


def _of_one_stage(options: PlanOptions) -> PlanOptions:
    """Returns the options with which to place documents on the ranks of one stage.

    All stages have the same placement. If servers differ in speed, all of them count as the first sort of server."""
    linear, cost = options.non_attention, options.cost
    unlike = isinstance(cost, PoolCost) or (linear is not None and linear.factors)
    if options.stages == 1 or not unlike:
        return options
    linear = None if linear is None else replace(linear, factors=())
    return replace(options, cost=cost.tables[0] if isinstance(cost, PoolCost) else cost, non_attention=linear)


def _laid_out(
    options: PlanOptions, lengths: np.ndarray, homes: np.ndarray | None, scheduler: Once
) -> tuple[Layout, ...]:
    # "lean" gives ping little work, but enough to hide pong's transfers. With several stages, idle stages compute a
    # part of ping's attention. So a lean ping would end before pong's transfers end.
    dealing = "lean" if options.stages == 1 else "even"
    laid = partial(_lay_out, options, lengths, homes, nano_batches=options.nano_batches, dealing=dealing)
    if not options.disaggregate or homes is not None:
        return laid()

    def planned(layouts: tuple[Layout, ...]) -> list[tuple[Plan, Plan]]:
        if options.keeps:
            return [(plan, plan) for plan in with_kept_rows([scheduler(each, "both") for each in layouts])]
        return [(scheduler(each, "forward"), scheduler(each, "backward")) for each in layouts]

    def price(layouts: tuple[Layout, ...]) -> Price:
        return price_of(planned(layouts), options.cost, options.links, options.resend, options.sinks)

    room = int(lengths.sum()) // options.ranks // options.align * options.align
    # If documents are whole, recurrent layers take less time, but more rows of q, k and v travel. Measurements on one
    # node showed that this saves time. Between nodes it was not measured, so "whole" is not tried there.
    one_node = not options.servers and len(set(options.links.nodes(options.homes))) == 1
    if not options.recurrent or options.ranks == 1 or not one_node or lengths.max(initial=0) > room:
        return _by_work(options, lengths, laid, price)
    whole = laid(placement="whole", cost=options.cost)
    if options.stages == 1 and is_level_at_home(whole, options.cost):
        scheduler.leave_at_home(whole)
        return whole
    by_work = _by_work(options, lengths, laid, price)
    return whole if price(whole).is_worth_fewer_pieces(price(by_work)) else by_work


def _by_work(
    options: PlanOptions, lengths: np.ndarray, laid: Callable[..., tuple[Layout, ...]], price: Callable[..., Price]
) -> tuple[Layout, ...]:
    together = partial(laid, placement="spread", cost=options.cost, ranks_per_node=options.stage_node)
    by_nano_batch = partial(laid, placement="spread_by_nano_batch", cost=options.cost)
    if options.ranks == 1:
        return by_nano_batch()
    # Servers without a model get rows from other ranks in any placement, so no placement can avoid transfers.
    if options.ranks > SMALL_POOL or options.servers:
        return together()
    work = options.cost.per_direction("both", lengths, lengths)
    none_is_long = bool((work.max(axis=1, initial=0.0) <= work.sum(axis=1) * _WHOLE / options.ranks).all())
    return cheaper(by_nano_batch, together, price, none_is_long)


def _lay_out(options: PlanOptions, lengths: np.ndarray, homes: np.ndarray | None, **how: Any) -> tuple[Layout, ...]:
    return lay_out(lengths, options.ranks, rank_of=homes, align=options.align, **how)


def _seconds(phase: Phase, options: PlanOptions, direction: Direction) -> np.ndarray:
    return np.asarray(
        sum(
            share * np.sum([seconds_by_kind(plan, options.cost_of_kind, direction) for plan in plans], axis=0)
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
