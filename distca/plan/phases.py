"""Pipelines: every phase of a tick planned over all stages' ranks together.

In a forward phase every stage runs the forward of some micro-batch or nothing, in a backward phase likewise, so the
attention of all ranks in a phase is one pool: a stage that is idle in warm-up or drain serves without own tokens.

With p stages, stage s runs the forward of micro-batch m in forward phase m + s and its backward in backward phase
m + (p − 1) − s; backward phase k runs in the same tick as forward phase k + p − 1.

Pool ranks are numbered stage by stage: stage · data_parallel + data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from distca.plan.layout import Layout, Shards
from distca.plan.plan import Plan

Schedule = Callable[[Layout, tuple[bool, ...]], Plan]
"""Plans a phase, given its layout and, by stage, whether the stage runs a micro-batch in it."""


@dataclass(frozen=True)
class Phase:
    """One phase, forward or backward.

    Attributes:
        micro_batches: by stage, the micro-batch that it runs; None for an idle stage.
        plans: by nano-batch, the plan over the whole pool.
    """

    micro_batches: tuple[int | None, ...]
    plans: tuple[Plan, ...]

    @property
    def busy(self) -> tuple[bool, ...]:
        """By stage, whether it runs a micro-batch."""
        return _busy(self.micro_batches)


@dataclass(frozen=True)
class PipelinePlan:
    """All phases of one step.

    Attributes:
        stages: pipeline stages.
        data_parallel: ranks per stage.
        forward: forward phases in order.
        backward: backward phases in order.
    """

    stages: int
    data_parallel: int
    forward: tuple[Phase, ...]
    backward: tuple[Phase, ...]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Of every phase and nano-batch, forward phases first."""
        return tuple(plan for phase in (*self.forward, *self.backward) for plan in phase.plans)

    def pool_rank(self, stage: int, rank: int) -> int:
        """Number in the pool of a stage's data-parallel rank."""
        return stage * self.data_parallel + rank

    def forward_phase(self, micro_batch: int, stage: int) -> int:
        """The forward phase in which ``stage`` runs ``micro_batch``."""
        return micro_batch + stage

    def backward_phase(self, micro_batch: int, stage: int) -> int:
        """The backward phase in which ``stage`` runs ``micro_batch``."""
        return micro_batch + self.stages - 1 - stage

    def order(self) -> Iterator[tuple[Literal["forward", "backward"], int]]:
        """All phases as they run. A backward phase runs as soon as the last stage has its micro-batch's forward behind
        it: no other order keeps fewer micro-batches in flight, on any stage (docs/architecture.md)."""
        for tick in range(len(self.forward) + self.stages - 1):
            if tick < len(self.forward):
                yield "forward", tick
            if tick >= self.stages - 1:
                yield "backward", tick - (self.stages - 1)


def plan_phases(
    layouts: Sequence[Sequence[Layout]], stages: int, forward: Schedule, backward: Schedule
) -> PipelinePlan:
    """Plan every phase of a step.

    Args:
        layouts: by micro-batch, its layout of each nano-batch over one stage's data-parallel ranks; the same on all
            stages.
        stages: pipeline stages.
        forward: plans a forward phase.
        backward: plans a backward phase.
    """
    ranks = layouts[0][0].ranks
    phases = range(len(layouts) + stages - 1)

    def phase(number: int, of_stage: Callable[[int], int], schedule: Schedule) -> Phase:
        running = [number - of_stage(stage) for stage in range(stages)]
        micro_batches = tuple(m if 0 <= m < len(layouts) else None for m in running)
        return Phase(
            micro_batches,
            tuple(
                schedule(
                    _joined([None if m is None else layouts[m][nano] for m in micro_batches], ranks),
                    _busy(micro_batches),
                )
                for nano in range(len(layouts[0]))
            ),
        )

    return PipelinePlan(
        stages,
        ranks,
        tuple(phase(number, lambda stage: stage, forward) for number in phases),
        tuple(phase(number, lambda stage: stages - 1 - stage, backward) for number in phases),
    )


def _busy(micro_batches: Sequence[int | None]) -> tuple[bool, ...]:
    return tuple(m is not None for m in micro_batches)


def _joined(parts: Sequence[Layout | None], ranks: int) -> Layout:
    """One layout over the ranks of all stages; idle stages have no rows. Documents are numbered stage by stage."""
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
        for shards, columns in ((layout.q, q), (layout.kv, kv)):
            document, start, stop, rank, row = shards.columns()
            columns.append((document + documents, start, stop, rank + stage * ranks, row))
        first.append(layout.first)
        last.append(layout.last)
        here = slice(stage * ranks, (stage + 1) * ranks)
        q_rows[here], carried_rows[here] = layout.q_rows, layout.carried_rows
        documents += len(layout.first)
    return Layout(
        len(parts) * ranks,
        np.concatenate(first),
        np.concatenate(last),
        Shards(*(np.concatenate(column) for column in zip(*q, strict=True))),
        Shards(*(np.concatenate(column) for column in zip(*kv, strict=True))),
        q_rows,
        carried_rows,
    )
