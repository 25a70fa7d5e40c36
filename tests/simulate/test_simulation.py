"""Predicted steps: what is computed is computed once, nothing beats its busiest stream, and cases by hand."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from distca.baselines import parse_mode
from distca.errors import SimulationError
from distca.plan import server_seconds, traffic
from distca.plan.cost.linear import LinearRate
from distca.simulate import Cluster, Job, Workload, dense, simulate
from distca.simulate.cad import planned
from distca.simulate.job import VALUE
from distca.simulate.simulation import Prediction
from distca.sizes.fp8_shapes import Fp8, rows_multiple
from tests.simulate.cases import NOTHING_ELSE, documents, pair_cost, small_job

RANDOM = np.random.default_rng(3).integers(1, 700, size=24)
MODES = ("distca", "packed", "packed-dealt", "variable", "cp2", "cp2-keep", "cp4", "ring4", "ulysses2")
PEERS = ("megatron-te", "megatron-te2-p2p", "megatron-te4-p2p", "megatron-te2-a2a")


def random_workload(micro_batches: int = 1) -> Workload:
    return Workload.draw(RANDOM, 700, 4, 2000, micro_batches, seed=1)


def pairs(workload: Workload) -> float:
    lengths = np.concatenate([each.lengths for each in workload.micro_batches])
    return float((lengths * (lengths + 1) / 2).sum())


@pytest.mark.parametrize("mode", MODES + PEERS)
def test_every_pair_is_computed_once_and_no_step_beats_its_busiest_stream(mode: str):
    job = small_job(4, tokens_per_rank=2000, gpus_per_node=2)
    workload = random_workload(2)
    found = simulate(job, parse_mode(mode), workload)
    # Ring steps are priced as shares of causal ranges, which counts half a pair of each row as one.
    assert found.attention_s.sum() == pytest.approx(job.layers * 3.5e-6 * pairs(workload), rel=0.01)
    rows = sum(each.tokens for each in workload.micro_batches)
    linear = job.layers * 3e-9 * job.model.layer_weights * rows
    assert found.busy_s.sum() == pytest.approx(found.attention_s.sum() + linear)
    assert found.step_s >= found.busy_s.max()
    assert 0 <= found.exposed_share <= found.idle_share + 1e-12
    assert found.tokens == rows


@pytest.mark.parametrize("mode", ["distca", "packed", "cp2", "ring4"])
def test_linear_layers_in_fp8_take_their_part_of_the_time(mode: str):
    cost = pair_cost()
    assert cost.linear is not None
    job = small_job(4, tokens_per_rank=2000, cost=replace(cost, linear=replace(cost.linear, fp8={"current": 0.25})))
    workload = random_workload()
    rows = sum(each.tokens for each in workload.micro_batches)
    plain, quick = (simulate(replace(job, fp8=fp8), parse_mode(mode), workload) for fp8 in ("none", "current"))
    saved = 0.75 * job.layers * 3e-9 * job.model.layer_weights * rows
    assert plain.busy_s.sum() - quick.busy_s.sum() == pytest.approx(saved)
    assert plain.attention_s.sum() == pytest.approx(quick.attention_s.sum())


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("fp8", get_args(Fp8))
def test_rows_of_a_half_are_a_multiple_of_what_training_takes(tp: int, fp8: Fp8):
    cost = replace(pair_cost(heads=4 // tp, kv_heads=4 // tp), linear=LinearRate(1e-9, 2e-9, {fp8: 0.5}))
    job = Job(dense(2, 128, 32, 4, 4, 8), Cluster(2 * tp), cost, tp=tp, fp8=fp8, tokens_per_rank=1000)
    assert planned(job, documents([(1000, 0), (900, 1)])).options.align == rows_multiple(fp8, tp)


def test_rows_that_are_sent_again_are_not_kept():
    """One document over four servers, of which each keeps most of its keys otherwise."""
    job, workload = small_job(4, layers=6, tokens_per_rank=1000), documents([(4000, 0)], bins=1)
    keep, resend = (simulate(replace(job, backward=how), parse_mode("distca"), workload) for how in ("keep", "resend"))
    assert resend.memory_bytes.max() < keep.memory_bytes.max()
    assert resend.sent_bytes.sum() > keep.sent_bytes.sum()
    assert resend.attention_s.sum() == pytest.approx(keep.attention_s.sum())


@pytest.mark.parametrize("mode", ["packed", "cp2-keep", "ulysses2"])
def test_a_layer_that_megatron_computes_again_has_its_attention_again(mode: str):
    job, workload = small_job(4, tokens_per_rank=2000), random_workload()
    once, again = (simulate(replace(job, recompute=how), parse_mode(mode), workload) for how in ("mlp", "all"))
    # 1 forward, 2.5 backward.
    np.testing.assert_allclose(again.attention_s, once.attention_s * 4.5 / 3.5)
    if mode != "packed":
        assert again.exposed_share > once.exposed_share, "what it gathered or exchanged comes again too"


def test_documents_of_a_step_are_dealt_over_its_micro_batches_as_training_has_it():
    job = small_job(2, tokens_per_rank=1000)
    workload = documents([(1000, 0), (400, 1), (300, 1), (300, 1)], [(1000, 0), (300, 1), (400, 1), (300, 1)])
    left, dealt = (planned(replace(job, deal=deal), workload) for deal in (False, True))
    assert 0 == dealt.balance().bytes_moved < left.balance().bytes_moved
    assert sorted(dealt.lengths[0].tolist()) == [1000, 1000]


@pytest.mark.parametrize("pp", [1, 2])
def test_the_plans_own_bytes_travel_and_its_own_seconds_are_served(pp: int):
    """Keys and values in two hops where there are several nodes."""
    job = small_job(4, pp=pp, tokens_per_rank=2000, level_time=False, gpus_per_node=2)
    workload = Workload.draw(RANDOM, 700, 4 // pp, 2000, 2, seed=1)
    plan = planned(job, workload)
    assert any(traffic(each, job.links).relay.total for _, phase in plan.phases for each in phase.plans)
    found = simulate(job, parse_mode("distca"), workload, plan=plan)
    served = sum(server_seconds(each, job.cost, way) for way, phase in plan.phases for each in phase.plans)
    if pp == 1:  # phases of forward and backward have one plan, which counts for both
        served = sum(server_seconds(each, job.cost, "both") for phase in plan.forward for each in phase.plans)
    assert found.attention_s == pytest.approx(job.layers * served)
    for _, phase in plan.phases:
        for each in phase.plans:
            each.check()
    passed = 0
    if pp > 1:  # activations and gradients of all micro-batches, once
        passed = 2 * sum(each.tokens for each in workload.micro_batches) * job.model.hidden * VALUE
    assert found.sent_bytes.sum() == pytest.approx(job.layers * plan.balance().bytes_moved + passed)


@pytest.mark.parametrize("mode", ["packed", "distca"])
def test_what_goes_from_stage_to_stage_counts_in_every_mode(mode: str):
    """Of documents that all servers have alike; a stage in the middle sends both ways."""
    job = small_job(3, pp=3, tokens_per_rank=500, level_time=False)
    workload = documents(*[[(500, 0)]] * 4, bins=1)
    found = simulate(job, parse_mode(mode), workload)
    attention = job.layers * planned(job, workload).balance().bytes_moved if mode == "distca" else 0
    passed = 4 * 500 * job.model.hidden * VALUE
    assert found.sent_bytes.sum() == pytest.approx(attention + 4 * passed)
    if not attention:
        assert found.sent_bytes.tolist() == [passed, 2 * passed, passed]


def test_two_ranks_by_hand_packed():
    job = small_job(2, layers=1)
    found = simulate(job, parse_mode("packed"), documents([(4, 0), (10, 1)]))
    seconds = [3.5e-6 * (n * (n + 1) / 2) + 3e-9 * job.model.layer_weights * n for n in (4, 10)]
    assert found.busy_s == pytest.approx(seconds)
    assert found.step_s - found.reduction_s == pytest.approx(seconds[1])


def test_two_ranks_by_hand_context_parallelism():
    job = small_job(cluster=Cluster(2, 1, network_gb_s=1e-3, network_latency_us=0), layers=1)
    found = simulate(job, parse_mode("cp2-keep"), documents([(400, 0)], bins=1))
    # Pieces of 100 tokens: rank 0 has the first and the last, rank 1 those between.
    ends = np.array([100, 200, 300, 400])
    own = 100 * (ends - 49.5)
    attention = 3.5e-6 * np.array([own[0] + own[3], own[1] + own[2]])
    linear = 3e-9 * job.model.layer_weights * 200
    assert found.busy_s == pytest.approx(attention + linear)
    carried = 200 * job.shape.kv_bytes / 1e6
    assert found.sent_bytes.tolist() == [2 * 200 * job.shape.kv_bytes] * 2
    # The gather of keys and values, and the return of their gradients.
    assert found.step_s - found.reduction_s == pytest.approx(attention.max() + linear + 2 * carried, rel=1e-3)
    hidden = simulate(job, parse_mode("cp2-keep"), documents([(400, 0)], bins=1), hidden=True)
    assert found.busy_s.max() < hidden.step_s < found.step_s


def test_equal_documents_give_equal_times_and_nothing_travels():
    job = small_job(4, gpus_per_node=1)
    found = simulate(job, parse_mode("distca"), documents([(500, r) for r in range(4)] * 2, bins=4))
    assert np.ptp(found.busy_s) == pytest.approx(0, abs=1e-12)
    assert not found.sent_bytes.any()
    assert found.idle_share == pytest.approx(found.reduction_s / found.step_s)
    assert found.attention_imbalance == pytest.approx(1)


def test_faster_links_never_make_a_step_longer_and_slow_ones_show():
    workload = random_workload()
    steps = []
    for rate in (1e-5, 1e-3, 1e-1, 100):
        job = small_job(cluster=Cluster(4, 1, network_gb_s=rate, network_latency_us=0), tokens_per_rank=2000)
        for mode in ("distca", "cp4", "ring4", "ulysses2"):
            found = simulate(job, parse_mode(mode), workload)
            steps.append((mode, found.step_s, found.exposed_share))
    for mode in ("distca", "cp4", "ring4", "ulysses2"):
        seconds, exposed = zip(*[each[1:] for each in steps if each[0] == mode], strict=True)
        assert list(seconds) == sorted(seconds, reverse=True)
        assert exposed[0] > 0.5 > 0.01 > exposed[-1]


def test_ticks_and_1f1b_take_as_many_phases_as_they_have():
    """Equal documents that fill every rank: all phases take equally long, and bubbles are warm-up and drain alone."""
    for micro_batches, pp in ((4, 2), (3, 3), (5, 4)):
        job = small_job(pp, pp=pp, layers=1, tokens_per_rank=100, level_time=False, cost=pair_cost(linear=0.0))
        job = replace(job, cluster=Cluster(pp, 8, nvlink_gb_s=1e9, nvlink_latency_us=0, network_latency_us=0))
        workload = documents(*[[(100, 0)]] * micro_batches, bins=1)
        found = simulate(job, parse_mode("packed"), workload)
        one = 3.5e-6 * 5050
        assert found.step_s == pytest.approx((micro_batches + pp - 1) * one)
        assert found.idle_share == pytest.approx((pp - 1) / (micro_batches + pp - 1))
        ticks = simulate(job, parse_mode("distca"), workload)
        # Idle stages serve, so that the same work takes less than as many full phases.
        assert micro_batches * one <= ticks.step_s * 1.0001 < (micro_batches + pp - 1) * one


def test_one_server_has_no_memory_for_rows_of_others():
    one, two = (
        [simulate(small_job(gpus, nccl=nccl), parse_mode("distca"), documents([(900, 0)], bins=1)) for nccl in (0, 1)]
        for gpus in (1, 2)
    )
    assert one[0].memory_bytes.max() == one[1].memory_bytes.max()
    assert two[0].memory_bytes.max() > two[1].memory_bytes.max()


def test_memory_grows_with_rows_and_shrinks_with_recomputation():
    def peak(mode: str = "distca", **options) -> Prediction:
        return simulate(small_job(4, tokens_per_rank=2000, **options), parse_mode(mode), random_workload())

    for mode in ("distca", "packed", "cp4-keep"):
        sizes = [peak(mode, recompute=how).memory_bytes.max() for how in ("none", "mlp", "all")]
        assert sizes[0] > sizes[1] > sizes[2]
    assert peak("cp4-keep").memory_bytes.max() > peak("cp4").memory_bytes.max()
    assert peak(layers=4).memory_bytes.max() > peak(layers=2).memory_bytes.max()


def test_a_timeline_covers_what_a_rank_did():
    job = small_job(4, tokens_per_rank=2000, gpus_per_node=1)
    found = simulate(job, parse_mode("distca"), random_workload(), watched=[2])
    assert {span.rank for span in found.spans} == {2}
    computed = sum(span.seconds for span in found.spans if span.track.startswith("compute"))
    assert computed == pytest.approx(found.busy_s[2])
    assert max(span.start + span.seconds for span in found.spans) <= found.step_s


def test_outputs_that_are_kept_spare_backward_a_part_of_its_elementwise_kernels() -> None:
    workload = random_workload()

    def step(elementwise_s: float, **options: object) -> Prediction:
        rates = replace(NOTHING_ELSE, elementwise_s=elementwise_s)
        job = small_job(4, tokens_per_rank=2000, gpus_per_node=4, rates=rates, **options)
        return simulate(job, parse_mode("packed"), workload)

    kept, again, bare = step(1e-9, keep_outputs=True), step(1e-9), step(0.0)
    assert again.step_s - kept.step_s == pytest.approx(0.21 * (again.step_s - bare.step_s))
    assert kept.memory_bytes.max() > again.memory_bytes.max()
    with pytest.raises(SimulationError, match="both must be none"):
        step(1e-9, keep_outputs=True, recompute="mlp")


@pytest.mark.parametrize("recompute, gathers", [("none", 8), ("mlp", 10), ("all", 12)])
def test_tensor_parallel_ranks_gather_at_the_rate_of_collectives(recompute: str, gathers: int) -> None:
    """And once more what is computed again."""

    def step(rate: float) -> float:
        cluster = Cluster(4, 4, nvlink_collective_gb_s=rate)
        job = small_job(cluster=cluster, cost=pair_cost(heads=1, kv_heads=1), tp=2, recompute=recompute)
        found = simulate(job, parse_mode("packed"), documents([(1000, 0), (1000, 1)]))
        return found.step_s - found.reduction_s

    row = 16 * VALUE / 2  # bytes that one of two ranks gets of a row
    assert step(1e-3) - step(2e-3) == pytest.approx(2 * gathers * 1000 * row * (1 / 1e6 - 1 / 2e6))


@pytest.mark.parametrize("pp", [1, 2])
def test_without_ping_pong_a_micro_batch_is_not_split(pp: int):
    job = small_job(4, pp=pp, tokens_per_rank=2000)
    workload = Workload.draw(RANDOM, 700, 4 // pp, 2000, 2, seed=1)
    split, unsplit = (simulate(job, parse_mode(name), workload) for name in ("distca", "distca-unsplit"))
    plan = planned(replace(job, ping_pong=False), workload)
    assert {len(each) for each in plan.layouts} == {1} and plan.options.non_attention is None
    assert simulate(replace(job, ping_pong=False), parse_mode("distca"), workload).step_s == unsplit.step_s
    assert unsplit.attention_s.sum() == pytest.approx(split.attention_s.sum())
    assert unsplit.memory_bytes.max() > split.memory_bytes.max(), "a whole micro-batch is at work"


def test_one_nano_batch_by_hand():
    """Every transfer is waited for, and begins when both ends are there."""
    job = small_job(cluster=Cluster(2, 1, network_gb_s=1e-3, network_latency_us=0), layers=1, ping_pong=False)
    workload, shape = documents([(400, 0)], bins=1), job.shape
    plan = planned(job, workload)
    ((each,),) = (phase.plans for phase in plan.forward)
    moved, clock = traffic(each), np.zeros(2)

    def bytes_of(rows, size, back=False):
        found = np.zeros((2, 2))  # [from, to]
        np.add.at(found, (rows.server, rows.home) if back else (rows.home, rows.server), rows.rows * size)
        return found

    def exchange(sent):
        incoming = sent.sum(axis=0)
        return np.where(incoming > 0, clock.max() + incoming / 1e6, clock)

    weights = job.model.layer_weights * 200 * 1e-9
    for way, there, back in (
        ("forward", (shape.q_bytes, shape.kv_bytes), (shape.o_bytes, 0)),
        ("backward", (shape.o_bytes, 0), (shape.q_bytes, shape.kv_bytes)),
    ):
        clock = exchange(sum(bytes_of(*rows) for rows in zip((moved.q, moved.kv), there, strict=True)))
        clock = clock + server_seconds(each, job.cost, way)
        clock = exchange(sum(bytes_of(*rows, back=True) for rows in zip((moved.q, moved.kv), back, strict=True)))
    found = simulate(job, parse_mode("distca"), workload, plan=plan)
    # Homes have equally many rows, so that linear layers put off both alike.
    assert moved.q.total and found.step_s - found.reduction_s == pytest.approx(clock.max() + 3 * weights)
