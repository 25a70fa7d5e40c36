"""The tick schedule: the only one of its length, in the order that keeps fewest micro-batches in flight."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations

import numpy as np
import pytest

from distca.plan import Layout, Plan, lay_out, plan_at_home
from distca.plan.pipeline import PipelinePlan, StageLayers, plan_phases


def _plan(stages: int, micro_batches: int) -> PipelinePlan:
    layouts = [lay_out([3, 5 + number], 1) for number in range(micro_batches)]
    return plan_phases(layouts, stages, StageLayers(1, 1), *[lambda layout, *_: plan_at_home(layout)] * 2)


def _assignments(stages: int, micro_batches: int, phases: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to give each stage a phase for each micro-batch: one micro-batch at a time, and each after the stage
    before it. Micro-batches are named in the order of the first stage."""

    def later(stage: int, before: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if stage == stages:
            yield ()
            return
        for mine in permutations(range(phases), micro_batches):
            if all(here > there for here, there in zip(mine, before, strict=True)):
                yield from ((mine, *rest) for rest in later(stage + 1, mine))

    for first in combinations(range(phases), micro_batches):
        yield from ((first, *rest) for rest in later(1, first))


@pytest.mark.parametrize("stages,micro_batches", [(1, 3), (2, 1), (2, 4), (3, 1), (3, 4), (4, 3), (4, 4)])
def test_no_other_schedule_takes_as_few_phases(stages: int, micro_batches: int) -> None:
    plan = _plan(stages, micro_batches)
    assert not list(_assignments(stages, micro_batches, len(plan.forward) - 1)), "none takes fewer"
    ours = tuple(tuple(plan.forward_phase(m, stage) for m in range(micro_batches)) for stage in range(stages))
    assert list(_assignments(stages, micro_batches, len(plan.forward))) == [ours]
    # Backward is the same from the last stage to the first.
    back = tuple(
        tuple(plan.backward_phase(m, stage) for m in range(micro_batches)) for stage in reversed(range(stages))
    )
    assert len(plan.backward) == len(plan.forward) and back == ours
    for phases, phase_of in ((plan.forward, plan.forward_phase), (plan.backward, plan.backward_phase)):
        for number, phase in enumerate(phases):
            for stage, micro_batch in enumerate(phase.micro_batches):
                due = [m for m in range(micro_batches) if phase_of(m, stage) == number]
                assert ([] if micro_batch is None else [micro_batch]) == due


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_last_stage_runs_its_layers_then_its_output_layer_then_serves(micro_batches: int) -> None:
    layouts, asked = [lay_out([3, 5 + number], 1) for number in range(micro_batches)], []

    def noted(layout: Layout, busy: tuple[bool, ...], serves: tuple[bool, ...]) -> Plan:
        asked.append(serves)
        return plan_at_home(layout)

    plan = plan_phases(layouts, 3, StageLayers(7, 2, 1, 3), noted, noted)
    assert all(serves[:2] == (True, True) for serves in asked)
    sizes = [3 + 5 + number for number in range(micro_batches)]
    for phases, output in ((plan.forward, 1), (plan.backward, 3)):
        for phase in phases:
            rows = [
                [sum(each.layout.q_rows[stage] for each in layer.plans) for stage in range(3)]
                for layer in phase.by_layer
            ]
            running = [0 if m is None else sizes[m] for m in phase.micro_batches]
            assert rows[:2] == [running] * 2 and rows[2:] == [[*running[:2], 0]] * 5
            counts = [7] if phase.micro_batches[-1] is None else [2, output, 5 - output]
            assert [segment.layers for segment in phase.segments] == counts
    # Where it has a micro-batch it is asked to serve its own layers and those after the output layer.
    last = [serves[2] for serves in asked]
    assert last.count(False) == 2 * micro_batches and len(last) == 2 * (micro_batches * 3 + 2)


def _peaks(order: list[str], stages: int, micro_batches: int) -> np.ndarray | None:
    """[stages] most micro-batches in flight; None where a backward would run before its forward.

    Whatever the micro-batches' order, stage s has behind it n - s forwards after n forward phases, and k - (p - 1 - s)
    backwards after k backward phases.
    """
    stage = np.arange(stages)
    done, peaks = {"forward": 0, "backward": 0}, np.zeros(stages, np.int64)
    for direction in order:
        done[direction] += 1
        forwards = np.clip(done["forward"] - stage, 0, micro_batches)
        backwards = np.clip(done["backward"] - (stages - 1 - stage), 0, micro_batches)
        # On the last stage a backward follows its forward; the others wait for its gradient anyway.
        if backwards[-1] > forwards[-1]:
            return None
        peaks = np.maximum(peaks, forwards - backwards)
    return peaks


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4])
def test_no_other_order_of_phases_keeps_fewer_in_flight(stages: int, micro_batches: int) -> None:
    plan = _plan(stages, micro_batches)
    order: list[str] = [direction for direction, _ in plan.order()]
    for wanted in ("forward", "backward"):
        assert [number for direction, number in plan.order() if direction == wanted] == list(range(len(plan.forward)))
    ours = _peaks(order, stages, micro_batches)
    assert ours is not None
    assert ours.tolist() == [min(2 * (stages - 1 - stage) + 1, micro_batches) for stage in range(stages)]
    phases = len(plan.forward)
    for forwards in combinations(range(2 * phases), phases):
        other = _peaks(["forward" if at in forwards else "backward" for at in range(2 * phases)], stages, micro_batches)
        assert other is None or (other >= ours).all()
