"""A step's plan under pipeline stages: all phases over the server pool of all stages, and this rank's routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distca.data.batch import RankBatch
from distca.data.sampler import MicroBatch
from distca.device.host_to_device import Upload
from distca.plan import Layout, Plan, lay_out, plan_at_home, server_seconds
from distca.plan.cost.model import CostModel, Direction
from distca.plan.cost_correction import Learned, Learnings, PhaseKind, ServerWork, work_of
from distca.plan.metrics import traffic
from distca.plan.pipeline import Phase, PipelinePlan, Schedule, plan_phases
from distca.plan.scheduler.scheduler import schedule
from distca.train.data.plan_options import Planning
from megatron_patches.pipeline_schedule import StageRoutes

_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True)
class PipelineInputs:
    """What a pipelined step needs beyond its batches.

    Attributes:
        layouts: by micro-batch, its layout of each nano-batch over one stage's data-parallel ranks.
        plan: all phases.
        kinds: of the phases, by which is learned.
        learned: by phase, what was counted with.
        routes: this rank's routes.
        seconds_before: [phases, pool ranks] attention seconds of one layer, documents in order, computed at home. Where
            the last stage has fewer layers, "one layer" is the mean over a phase's.
        seconds_after: [phases, pool ranks] the same as planned, with all that was learned.
        seconds_beside: [phases, pool ranks] what plans count as computed beside attention, for each layer; 0 where they
            level attention alone.
        work: [phases, pool ranks] what servers were given of one layer, by the cost model alone.
        bytes_moved: bytes that travel for one layer of every stage in the whole step.
    """

    layouts: tuple[tuple[Layout, ...], ...]
    plan: PipelinePlan
    kinds: tuple[PhaseKind, ...]
    learned: tuple[Learned, ...]
    routes: StageRoutes
    seconds_before: np.ndarray
    seconds_after: np.ndarray
    seconds_beside: np.ndarray
    work: ServerWork
    bytes_moved: int


def plan_pipeline(
    planning: Planning, micro_batches: Sequence[MicroBatch], upload: Upload, learned: Learnings
) -> PipelineInputs:
    """Lay out every micro-batch and plan every phase, with what was ``learned`` of its kind; the routes are ready once
    ``upload`` was sent."""
    layouts = [
        _lay_out(planning, each, nano_batches=planning.nano_batches, dealing="even", placement="spread")
        for each in micro_batches
    ]
    packed = [_lay_out(planning, each) for each in micro_batches]
    forward, backward = (_scheduler(planning, direction, learned) for direction in _DIRECTIONS)
    plan = plan_phases(layouts, planning.stages, planning.layers, forward, backward)
    at_home = plan_phases(packed, planning.stages, planning.layers, _at_home, _at_home)
    phases = _phases(plan)
    kinds = tuple((direction, phase.busy) for direction, phase in phases)
    of_phases = tuple(_of_kind(planning, learned, kind) for kind in kinds)
    return PipelineInputs(
        tuple(layouts),
        plan,
        kinds,
        of_phases,
        StageRoutes.of(plan, planning.stage, planning.rank, upload),
        np.stack([_seconds(phase, planning.cost, direction) for direction, phase in _phases(at_home)]),
        np.stack(
            [
                _seconds(phase, own.cost(planning.cost), direction) / own.speeds
                for (direction, phase), own in zip(phases, of_phases, strict=True)
            ]
        ),
        np.stack([_beside_in(phase, planning, direction) for direction, phase in phases]),
        ServerWork.of_phases(_work(phase, planning, direction) for direction, phase in phases),
        round(sum(_bytes(phase, planning.cost, direction) for direction, phase in phases)),
    )


def with_equal_rows(batches: Sequence[RankBatch]) -> list[RankBatch]:
    """Pad a rank's micro-batches of a step to the rows of the largest one: token 0, no loss, part of no document.

    megatron's 1F1B moves activations of one size between stages; of sizes that differ it would first send each size
    ahead and wait for it on the host, at every stage and micro-batch.
    """
    assert all(len(batch.nano_rows) == 1 for batch in batches), "only rows of one nano-batch end where padding begins"
    rows = max(batch.nano_rows[0] for batch in batches)

    def padded(column: np.ndarray) -> np.ndarray:
        return np.pad(column, (0, rows - len(column)))

    return [
        replace(
            batch,
            tokens=padded(batch.tokens),
            labels=padded(batch.labels),
            loss_mask=padded(batch.loss_mask),
            positions=padded(batch.positions),
            nano_rows=(rows,),
        )
        for batch in batches
    ]


def _lay_out(planning: Planning, micro_batch: MicroBatch, **options: Any) -> tuple[Layout, ...]:
    return lay_out(
        micro_batch.lengths,
        planning.ranks,
        rank_of=micro_batch.rank_of,
        align=planning.chunks,
        cost=planning.cost,
        **options,
    )


def _phases(plan: PipelinePlan) -> list[tuple[Direction, Phase]]:
    both: tuple[tuple[Direction, tuple[Phase, ...]], ...] = (("forward", plan.forward), ("backward", plan.backward))
    return [(direction, phase) for direction, several in both for phase in several]


def _at_home(layout: Layout, busy: tuple[bool, ...], serves: tuple[bool, ...]) -> Plan:
    return plan_at_home(layout)


def _of_kind(planning: Planning, learned: Learnings, kind: PhaseKind) -> Learned:
    return learned.get(kind, Learned.nothing(planning.pool_ranks))


def _scheduler(planning: Planning, direction: Direction, learned: Learnings) -> Schedule:
    def scheduled(layout: Layout, busy: tuple[bool, ...], serves: tuple[bool, ...]) -> Plan:
        own = _of_kind(planning, learned, (direction, busy))
        return schedule(
            layout,
            cost=own.cost(planning.cost),
            direction=direction,
            resend=True,
            tolerance=planning.tolerance,
            speeds=own.speeds * np.repeat(serves, planning.ranks),
            links=planning.links,
            beside=None if planning.beside is None else _beside(planning, direction, [layout]),
        )

    return scheduled


def _beside(planning: Planning, direction: Direction, halves: Sequence[Layout]) -> np.ndarray:
    """[pool ranks] seconds that busy ranks compute beside the attention of one layer."""
    per_row = 0.0 if planning.beside is None else getattr(planning.beside, direction)
    return per_row * np.sum([half.q_rows for half in halves], axis=0)


def _mean(phase: Phase, of: Callable[[Sequence[Plan]], np.ndarray]) -> np.ndarray:
    """What ``of`` says of a layer's plans, mean over the layers of a phase."""
    layers = sum(segment.layers for segment in phase.segments)
    mean: np.ndarray = np.sum([segment.layers * of(segment.plans) for segment in phase.segments], axis=0) / layers
    return mean


def _seconds(phase: Phase, cost: CostModel, direction: Direction) -> np.ndarray:
    return _mean(phase, lambda plans: np.sum([server_seconds(plan, cost, direction) for plan in plans], axis=0))


def _beside_in(phase: Phase, planning: Planning, direction: Direction) -> np.ndarray:
    return _mean(phase, lambda plans: _beside(planning, direction, [plan.layout for plan in plans]))


def _work(phase: Phase, planning: Planning, direction: Direction) -> ServerWork:
    def of(plans: Sequence[Plan]) -> np.ndarray:
        work = work_of([(plan, direction) for plan in plans], planning.cost, planning.pool_ranks)
        return np.stack((work.seconds, work.reaching))

    return ServerWork(*_mean(phase, of))


def _bytes(phase: Phase, cost: CostModel, direction: Direction) -> float:
    q_bytes, kv_bytes = cost.shape.moved_bytes(direction, resend=True)

    def of(plans: Sequence[Plan]) -> np.ndarray:
        rows = [traffic(plan) for plan in plans]
        return np.array(sum(each.q_rows * q_bytes + each.kv_rows * kv_bytes for each in rows), np.float64)

    return float(_mean(phase, of))
