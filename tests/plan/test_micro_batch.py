import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.data.mixes import sample_lengths
from distca.plan import (
    AttentionKind,
    Links,
    MicroBatchPlan,
    analytic_cost,
    area_cost,
    imbalance,
    lay_out,
    plan_at_home,
    plan_micro_batch,
    route,
    schedule,
    server_seconds,
)
from distca.plan.cost.analytic import cost_of_kind
from tests.plan.cases import lengths

LLAMA_8B = analytic_cost(32, 8, 128)


def tables(made: MicroBatchPlan) -> list[np.ndarray]:
    plans = [plan for nano in made.nano_batches for plan in (nano.forward, nano.backward)]
    return [np.stack(dataclasses.astuple(plan.tasks)) for plan in plans]


@settings(max_examples=50)
@given(lengths, st.integers(1, 5), st.sampled_from((1, 2)), st.booleans(), st.booleans())
def test_every_nano_batch_is_planned_completely_and_the_same_every_time(
    documents: list[int], ranks: int, nano_batches: int, resend: bool, disaggregate: bool
) -> None:
    options = {"nano_batches": nano_batches, "resend": resend, "disaggregate": disaggregate}
    made = plan_micro_batch(documents, ranks, area_cost(), **options)
    again = plan_micro_batch(np.array(documents, np.int64), ranks, area_cost(), **options)
    assert len(made.nano_batches) == nano_batches
    assert made.lengths.tolist() == documents
    for nano in made.nano_batches:
        nano.forward.check()
        nano.backward.check()
        assert nano.forward.layout is nano.backward.layout is nano.layout
        assert resend or nano.backward is nano.forward
    assert all(np.array_equal(a, b) for a, b in zip(tables(made), tables(again), strict=True))
    computed = sum((nano.layout.last - nano.layout.first for nano in made.nano_batches), np.zeros(len(documents)))
    assert computed.tolist() == documents
    if not disaggregate and nano_batches == 1:
        assert np.array_equal(made.seconds_before, made.seconds_after)
    assert made.planning_ms > 0


@pytest.mark.parametrize("resend", [False, True])
def test_bytes_are_those_of_the_routes(resend: bool) -> None:
    made = plan_micro_batch([9000, 130, 77, 2049, 1], 4, analytic_cost(8, 2, 64), nano_batches=2, resend=resend)
    q_row, kv_row, lse = 8 * 64 * 2, 2 * 2 * 64 * 2, 8 * 4

    def sent(name: str, kind: str) -> int:
        plans = [getattr(nano, name) for nano in made.nano_batches]
        return sum(getattr(route(plan, rank), kind).send.total for plan in plans for rank in range(4))

    moved = made.bytes_moved
    assert moved.q == sent("forward", "q") * q_row > 0
    assert moved.kv == sent("forward", "kv") * kv_row > 0
    if resend:
        assert moved.o == sent("forward", "q") * (q_row + lse)
        assert moved.backward == sent("backward", "q") * (4 * q_row + lse) + sent("backward", "kv") * 2 * kv_row
    else:
        assert moved.o == moved.q
        assert moved.backward == 2 * moved.q + moved.kv
    assert moved.total == moved.q + moved.o + moved.kv + moved.backward


def test_figures_for_the_log() -> None:
    documents = sample_lengths("pretrain", 8 * 131072, 0)
    made = plan_micro_batch(documents, 8, LLAMA_8B, nano_batches=2)
    home = sum(server_seconds(plan_at_home(nano.layout), LLAMA_8B, "both") for nano in made.nano_batches)
    np.testing.assert_allclose(made.seconds_at_home, home)
    (packed,) = lay_out(documents, 8)
    before = server_seconds(plan_at_home(packed), LLAMA_8B, "both")
    np.testing.assert_allclose(made.seconds_before, before)
    assert made.imbalance_before == pytest.approx(before.max() / before.mean())
    assert made.imbalance_before > 1.5
    assert imbalance(made.seconds_at_home) < 1.1
    assert made.imbalance_after <= 1.0201
    plain = plan_micro_batch(documents, 8, LLAMA_8B, disaggregate=False)
    assert plain.imbalance_after == plain.imbalance_before == made.imbalance_before


def test_resend_plans_the_backward_on_its_own() -> None:
    made = plan_micro_batch(sample_lengths("pretrain", 8 * 131072, 1), 8, LLAMA_8B, resend=True)
    nano = made.nano_batches[0]
    assert nano.backward is not nano.forward
    for plan, direction in ((nano.forward, "forward"), (nano.backward, "backward")):
        seconds = server_seconds(plan, LLAMA_8B, direction)
        assert seconds.max() <= 1.0201 * seconds.mean()


def test_options_reach_the_scheduler() -> None:
    documents = sample_lengths("pretrain", 4 * 131072, 1)
    homes = np.arange(len(documents)) % 4
    options = {"links": Links(2), "tolerance": 0.1}
    made = plan_micro_batch(documents, 4, LLAMA_8B, rank_of=homes, **options)
    (layout,) = lay_out(documents, 4, rank_of=homes)
    assert np.array_equal(*(plan.tasks.stop for plan in (made.plans[0], schedule(layout, LLAMA_8B, **options))))
    assert not np.array_equal(made.plans[0].tasks.stop, schedule(layout, LLAMA_8B).tasks.stop)


@pytest.mark.parametrize("resend", [False, True])
def test_figures_of_a_mixed_stack_are_those_of_its_kinds_by_their_layers(resend: bool) -> None:
    kinds = (AttentionKind(1.0, sink=True), AttentionKind(1.0, window=1024, sink=True))
    costs = tuple(cost_of_kind(kind, LLAMA_8B) for kind in kinds)
    documents = sample_lengths("pretrain", 4 * 131072, 1)
    mixed = plan_micro_batch(
        documents, 4, LLAMA_8B, nano_batches=2, resend=resend, kinds=kinds, costs=costs, layer_kinds=((0, 1, 1, 1),)
    )
    full, windowed = mixed.of_kind(0), mixed.of_kind(1)
    assert [nano.cost for nano in mixed.every_nano_batch] == [costs[0], costs[0], costs[1], costs[1]]
    assert len(mixed.plans) == 8 and full.plans + windowed.plans == mixed.plans
    for figure in ("seconds_before", "seconds_at_home", "seconds_after"):
        mean = 0.25 * getattr(full, figure) + 0.75 * getattr(windowed, figure)
        np.testing.assert_allclose(getattr(mixed, figure), mean)
    assert windowed.bytes_moved.q == windowed.bytes_moved.o == 0 < windowed.bytes_moved.kv < full.bytes_moved.kv
    # Sinks are added at home, so log-sum-exp comes back beside every output row.
    assert full.bytes_moved.o == full.bytes_moved.q // 8192 * (8192 + 4 * 32)
    assert mixed.bytes_moved.total == pytest.approx(0.25 * full.bytes_moved.total + 0.75 * windowed.bytes_moved.total)
