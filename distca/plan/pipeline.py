"""Pipelines: every phase of a tick planned over all stages' ranks together.

In a forward phase every stage runs the forward of some micro-batch or nothing, in a backward phase likewise, so the
attention of all ranks in a phase is one pool: a stage that is idle in warm-up or drain serves without own tokens.

With p stages, stage s runs the forward of micro-batch m in forward phase m + s and its backward in backward phase
m + (p − 1) − s; backward phase k runs in the same tick as forward phase k + p − 1.

The last stage, which also computes the output layer, may have fewer layers than the others. In a phase of one of its
micro-batches it runs its layers with the others' first ones; while they run the rest it computes the output layer and
the loss, and after that serves. Backward is the same in reverse.

Pool ranks are numbered stage by stage: stage · data_parallel + data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from distca.plan.layout import Layout, Shards
from distca.plan.plan import Plan


class Schedule(Protocol):
    """Plans some layers of a phase."""

    def __call__(self, layout: Layout, busy: tuple[bool, ...], serves: tuple[bool, ...]) -> Plan:
        """The plan.

        Args:
            layout: of one nano-batch over the pool.
            busy: by stage, whether it runs a micro-batch in the phase.
            serves: by stage, whether it has time for others in these layers.
        """
        ...


@dataclass(frozen=True)
class StageLayers:
    """How many layers each stage has.

    Attributes:
        most: of every stage but the last.
        last: of the last stage; as many or fewer.
        forward_output: of the layers that the last stage does not have, during how many of the others' it computes
            output layer and loss in a forward phase and serves nothing.
        backward_output: the same in a backward phase.
    """

    most: int
    last: int
    forward_output: int = 0
    backward_output: int = 0

    def __post_init__(self) -> None:
        missing = self.most - self.last
        assert self.last > 0 and max(self.forward_output, self.backward_output) <= missing, self

    def of(self, stage: int, stages: int) -> int:
        """Layers of a stage."""
        return self.last if stage == stages - 1 else self.most


@dataclass(frozen=True, eq=False)
class Segment:
    """Layers of a phase that are planned alike, because the same stages run them.

    Attributes:
        layers: how many.
        plans: by nano-batch, the plan over the whole pool.
    """

    layers: int
    plans: tuple[Plan, ...]


@dataclass(frozen=True)
class Phase:
    """One phase, forward or backward.

    Attributes:
        micro_batches: by stage, the micro-batch that it runs; None for an idle stage.
        segments: all layers, from the first to the last.
    """

    micro_batches: tuple[int | None, ...]
    segments: tuple[Segment, ...]

    @property
    def busy(self) -> tuple[bool, ...]:
        """By stage, whether it runs a micro-batch."""
        return _busy(self.micro_batches)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Of every segment and nano-batch."""
        return tuple(plan for segment in self.segments for plan in segment.plans)

    @property
    def by_layer(self) -> tuple[Segment, ...]:
        """The segment of every layer."""
        return tuple(segment for segment in self.segments for _ in range(segment.layers))


@dataclass(frozen=True)
class PipelinePlan:
    """All phases of one step.

    Attributes:
        stages: pipeline stages.
        data_parallel: ranks per stage.
        layers: of the stages.
        forward: forward phases in order.
        backward: backward phases in order.
    """

    stages: int
    data_parallel: int
    layers: StageLayers
    forward: tuple[Phase, ...]
    backward: tuple[Phase, ...]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Of every phase, segment and nano-batch, forward phases first."""
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
    layouts: Sequence[Sequence[Layout]], stages: int, layers: StageLayers, forward: Schedule, backward: Schedule
) -> PipelinePlan:
    """Plan every phase of a step.

    Args:
        layouts: by micro-batch, its layout of each nano-batch over one stage's data-parallel ranks; the same on all
            stages.
        stages: pipeline stages.
        layers: of the stages.
        forward: plans a forward phase.
        backward: plans a backward phase.
    """
    ranks = layouts[0][0].ranks
    phases = range(len(layouts) + stages - 1)

    def planned(running: Sequence[int | None], busy: tuple[bool, ...], serves: bool, schedule: Schedule) -> list[Plan]:
        of_stages = (*(True for _ in range(stages - 1)), serves)
        halves = ([None if m is None else layouts[m][nano] for m in running] for nano in range(len(layouts[0])))
        return [schedule(_joined(half, ranks), busy, of_stages) for half in halves]

    def phase(number: int, of_stage: Callable[[int], int], schedule: Schedule, output: int) -> Phase:
        due = [number - of_stage(stage) for stage in range(stages)]
        running = tuple(m if 0 <= m < len(layouts) else None for m in due)
        parts = _parts(layers, output, running)
        segments = (
            Segment(count, tuple(planned(part, _busy(running), serves, schedule))) for count, part, serves in parts
        )
        return Phase(running, tuple(segments))

    return PipelinePlan(
        stages,
        ranks,
        layers,
        tuple(phase(number, lambda stage: stage, forward, layers.forward_output) for number in phases),
        tuple(phase(number, lambda stage: stages - 1 - stage, backward, layers.backward_output) for number in phases),
    )


def _parts(
    layers: StageLayers, output: int, running: tuple[int | None, ...]
) -> list[tuple[int, tuple[int | None, ...], bool]]:
    """The segments of a phase: how many layers, what runs in them by stage, and whether the last stage serves; it is at
    the output layer during ``output`` of them."""
    if running[-1] is None or layers.last == layers.most:
        return [(layers.most, running, True)]
    others = (*running[:-1], None)
    rest = layers.most - layers.last - output
    parts = [(layers.last, running, True), (output, others, False), (rest, others, True)]
    return [part for part in parts if part[0]]


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
