"""What a step is given: tokens on their rank, planned seconds by phase and server, bytes, and where the data stood."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from distca.data.batch import rank_batch
from distca.data.corpus import DocumentSet
from distca.data.sampler import MicroBatch, Sampler
from distca.plan import Links, Plan, lay_out, plan_at_home, server_seconds
from distca.plan.cost.analytic import area_cost
from distca.plan.cost_correction import WHOLE_STEP, Learned
from distca.plan.metrics import traffic
from distca.plan.micro_batch import plan_micro_batch
from distca.plan.plan import fingerprint
from distca.train.data.plan_options import Planning
from distca.train.data.prefetch import StepInputs, make_step_inputs
from tests.train.metrics.test_phase_table import PLANNING

LENGTHS = ((40, 3, 1, 21), (30, 31, 2, 1), (66,))
RANKS = 4
COST = area_cost(4, 2, 8)
Q, KV, LSE = COST.shape.q_bytes, COST.shape.kv_bytes, 4 * 4
BACKWARD = 2.5
"""Times the forward pass, as area_cost has it."""


class _Documents(DocumentSet):
    """A token says its document and its position."""

    def __init__(self) -> None:
        self.lengths = np.concatenate([np.array(lengths) for lengths in LENGTHS])

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        return 1000 * (document + 1) + np.arange(start, stop)


class _Dealt:
    """Deals LENGTHS, and counts how often."""

    def __init__(self, whole: bool) -> None:
        self.times, self.micro_batches, first = 0, [], 0
        for lengths in LENGTHS:
            home = np.arange(len(lengths)) % RANKS if whole else None
            documents = np.arange(first, first + len(lengths))
            self.micro_batches.append(MicroBatch(documents, np.array(lengths), home))
            first += len(lengths)

    def next(self) -> list[MicroBatch]:
        self.times += 1
        return self.micro_batches

    def state_dict(self) -> dict[str, Any]:
        return {"times": self.times}


def _planning(stages: int = 1, **settings: Any) -> Planning:
    chosen = {"ranks": RANKS, "stage": 0, "stages": stages, "cost": COST, "disaggregate": True, "nano_batches": 2}
    return replace(PLANNING, **chosen | {"resend": stages > 1} | settings)


def _made(planning: Planning, speeds: Any = None, whole: bool = False) -> StepInputs:
    return make_step_inputs(planning, _Documents(), cast(Sampler, _Dealt(whole)), speeds or {})


def _pairs(number: int) -> int:
    """Of query and key in a micro-batch, which area_cost counts a second each."""
    return sum(length * (length + 1) // 2 for length in LENGTHS[number])


def _moved(plans: list[Plan], q_bytes: int, kv_bytes: int) -> int:
    return sum(traffic(plan).q_rows * q_bytes + traffic(plan).kv_rows * kv_bytes for plan in plans)


@pytest.mark.parametrize("stages,disaggregate", [(1, True), (1, False), (2, True), (2, False)])
def test_every_token_is_on_one_rank_with_what_belongs_to_it(stages: int, disaggregate: bool) -> None:
    seen: list[list[int]] = [[] for _ in LENGTHS]
    for rank in range(RANKS):
        settings: dict[str, Any] = {"disaggregate": disaggregate, "nano_batches": 2 if disaggregate else 1}
        inputs = _made(_planning(stages, rank=rank, stage=stages - 1, **settings), whole=not disaggregate)
        assert inputs.sampler_state == {"times": 1}
        assert inputs.lengths.tolist() == [length for lengths in LENGTHS for length in lengths]
        for number, batch in enumerate(inputs.batches):
            tokens, labels = batch.tokens[0], batch.labels[0]
            assert (labels[batch.loss_mask] == tokens[batch.loss_mask] + 1).all()
            assert (batch.positions == (tokens % 1000)).all()
            seen[number] += tokens[tokens > 0].tolist()
    first = 0
    for lengths, tokens in zip(LENGTHS, seen, strict=True):
        documents = enumerate(lengths, start=first + 1)
        assert sorted(tokens) == [1000 * number + place for number, length in documents for place in range(length)]
        first += len(lengths)


def test_one_stage_counts_what_its_plans_say() -> None:
    speeds = np.array([1.2, 1.0, 1.0, 0.8])
    inputs = _made(_planning(), {WHOLE_STEP: Learned(speeds)})
    plans = [
        plan_micro_batch(lengths, RANKS, COST, nano_batches=2, align=1, resend=False, tolerance=0.02, speeds=speeds)
        for lengths in LENGTHS
    ]
    assert inputs.fingerprint == fingerprint(each for plan in plans for each in plan.plans)
    assert [each.speeds.tolist() for each in inputs.learned] == [speeds.tolist()] * len(LENGTHS)
    assert inputs.work.seconds.sum(axis=1) == pytest.approx([(1 + BACKWARD) * _pairs(n) for n in range(len(LENGTHS))])
    at_home = [server_seconds(plan_at_home(lay_out(lengths, RANKS)[0]), COST, "both") for lengths in LENGTHS]
    assert inputs.seconds_before == pytest.approx(np.stack(at_home))
    forward = [nano.forward for plan in plans for nano in plan.nano_batches]
    assert inputs.bytes_moved == 2 * _moved(forward, 2 * Q, KV)


def test_stages_with_attention_at_home_each_compute_all_of_it() -> None:
    inputs = _made(_planning(2, disaggregate=False, nano_batches=1), whole=True)
    assert inputs.pipeline is None and inputs.bytes_moved == 0
    for figures in (inputs.seconds_before, inputs.seconds_after):
        assert figures.shape == (len(LENGTHS), 2 * RANKS)
        assert figures[:, :RANKS].tolist() == figures[:, RANKS:].tolist()
    expected = [[(1 + BACKWARD) * length * (length + 1) / 2 for length in lengths] for lengths in LENGTHS]
    assert inputs.seconds_after[:2, :RANKS].tolist() == expected[:2]
    assert len({batch.tokens.shape for batch in inputs.batches}) == 1, "1F1B moves activations of one size"


def test_pipelines_count_by_phase() -> None:
    inputs = _made(_planning(2))
    assert inputs.pipeline is not None
    plan, phases = inputs.pipeline.plan, len(LENGTHS) + 1
    before, after = (figures.reshape(2, phases, 2, RANKS) for figures in (inputs.seconds_before, inputs.seconds_after))
    for direction, factor in enumerate((1, BACKWARD)):
        for phase in range(phases):
            # Forward, stage s runs micro-batch m in phase m + s; backward the last stage is the first.
            running = [phase - (stage if direction == 0 else 1 - stage) for stage in range(2)]
            at_home = [_at_home(number) if 0 <= number < len(LENGTHS) else np.zeros(RANKS) for number in running]
            assert before[direction, phase] == pytest.approx(factor * np.stack(at_home))
            assert after[direction, phase].sum() == pytest.approx(factor * np.sum(at_home))
    forward, backward = (
        [each for phase in several for each in phase.plans] for several in (plan.forward, plan.backward)
    )
    assert inputs.bytes_moved == _moved(forward, 2 * Q + LSE, KV) + _moved(backward, 4 * Q + LSE, 2 * KV)
    assert inputs.fingerprint == fingerprint(plan.plans)
    assert [kind[0] for kind in inputs.pipeline.kinds] == ["forward"] * phases + ["backward"] * phases


def _at_home(number: int) -> np.ndarray:
    return server_seconds(plan_at_home(lay_out(LENGTHS[number], RANKS)[0]), COST, "forward")


@pytest.mark.parametrize("stages", [1, 2])
def test_plans_follow_the_tolerance(stages: int) -> None:
    level, loose = (_made(_planning(stages, tolerance=tolerance)) for tolerance in (0.02, 0.9))
    assert loose.bytes_moved < level.bytes_moved and loose.fingerprint != level.fingerprint


@pytest.mark.parametrize("stages", [1, 2])
def test_plans_prefer_servers_on_the_same_machine(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LENGTHS", ((400, 3, 10, 210), (300, 310, 20, 1), (660,)))
    near, alike = (_made(_planning(stages, links=links)) for links in (Links(2), Links()))
    assert near.fingerprint != alike.fingerprint
    if stages == 1:
        plans = [
            plan_micro_batch(each, RANKS, COST, nano_batches=2, tolerance=0.02, links=Links(2)) for each in LENGTHS
        ]
        assert near.fingerprint == fingerprint(each for plan in plans for each in plan.plans)
        return
    assert near.pipeline is not None and alike.pipeline is not None
    machine = np.arange(stages * RANKS) // 2
    between = [
        sum(
            int((rows.q + rows.kv)[machine[:, None] != machine].sum())
            for rows in map(traffic, each.pipeline.plan.plans)
        )
        for each in (near, alike)
    ]
    assert between[0] < between[1]


@pytest.mark.parametrize("stages,nano_batches", [(1, 2), (2, 2), (2, 1)])
def test_rows_lie_in_the_chunks_of_their_layouts(stages: int, nano_batches: int) -> None:
    inputs = _made(_planning(stages, chunks=4, nano_batches=nano_batches))
    halves: dict[str, Any] = {"nano_batches": nano_batches, "align": 4}
    for number, (dealt, batch) in enumerate(zip(_Dealt(False).micro_batches, inputs.batches, strict=True)):
        if stages == 1:
            planned = plan_micro_batch(LENGTHS[number], RANKS, COST, tolerance=0.02, resend=False, **halves)
            layouts = tuple(nano.layout for nano in planned.nano_batches)
        else:
            # Phases of several stages share servers: work is spread over all ranks, and halves are alike.
            layouts = lay_out(LENGTHS[number], RANKS, cost=COST, dealing="even", placement="spread", **halves)
        rows = rank_batch(_Documents(), dealt, layouts, 0, align=4, chunks=4)
        assert batch.tokens[0].tolist() == rows.tokens.tolist()
        assert batch.loss_mask.tolist() == rows.loss_mask.tolist()


def test_the_pool_is_numbered_stage_by_stage() -> None:
    places = [_planning(3, stage=stage, rank=rank) for stage in range(3) for rank in range(RANKS)]
    assert [place.pool_rank for place in places] == list(range(3 * RANKS))
    assert {place.pool_ranks for place in places} == {3 * RANKS}
