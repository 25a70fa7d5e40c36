"""Steps predicted for servers that are not alike, and for servers without a model."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.derived_gpus import GPUS, derived
from distca.baselines import parse_mode
from distca.commands.plan_results import server_bytes
from distca.plan import MicroBatchPlan, TableCost, server_seconds
from distca.plan.cost.pool import PoolCost
from distca.plan.cost.scaled import scaled
from distca.plan.cost.table_file import find_table
from distca.plan.metrics import receive_buffer_gb
from distca.simulate import Cluster, SimulationError, simulate
from distca.simulate.cad import planned
from distca.simulate.job import Backward
from tests.simulate.cases import NOTHING_ELSE, pair_cost, small_job
from tests.simulate.test_simulation import pairs, random_workload

DISTCA = parse_mode("distca")
FAST = {"nvlink_gb_s": 1e9, "network_gb_s": 1e9, "nvlink_latency_us": 0.0, "network_latency_us": 0.0}
COST = pair_cost(linear=1e-8)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("slow", [1.0, 3.0])
def test_servers_without_a_model_serve_and_do_nothing_else(stages: int, slow: float) -> None:
    homes, servers = 4 * stages, 2
    cost = PoolCost((COST, scaled(COST, slow, slow)), (0,) * homes + (1,) * servers)
    job = small_job(
        pp=stages,
        cost=cost,
        cluster=Cluster(homes + servers, 2),
        tokens_per_rank=2000,
        extra_servers=servers,
        recompute="none",
        rates=replace(NOTHING_ELSE, optimizer_s=1e-6),
    )
    assert job.homes == homes and job.data_parallel == 4 and job.non_attention is not None
    workload = random_workload(2)
    found = simulate(job, DISTCA, workload)
    work = found.attention_s / np.array(job.cost.of_server).choose((1.0, slow))
    assert work.sum() == pytest.approx(stages * job.layers * 3.5e-6 * pairs(workload), rel=0.01)
    assert (found.attention_s[homes:] > 0).all()
    np.testing.assert_allclose(found.busy_s[homes:], found.attention_s[homes:])
    held = found.memory_bytes
    assert held[homes:].max() < held[:homes].min()


@pytest.mark.parametrize(("backward", "apart"), [("keep", 0.02), ("resend", 0.02)])
def test_distca_plan_predicts_the_memory_of_servers_that_the_simulator_does(backward: Backward, apart: float) -> None:
    job = small_job(cluster=Cluster(6), tokens_per_rank=2000, extra_servers=2, recompute="none", backward=backward)
    workload = random_workload()
    step = planned(job, workload)
    buffer = receive_buffer_gb(job.shape, job.tokens_per_rank, resend=job.resend, sinks=False) * 2**30
    simulated = simulate(job, DISTCA, workload, plan=step).memory_bytes[job.homes :]
    found = server_bytes(MicroBatchPlan(step, 0.0), job.layers)
    np.testing.assert_allclose(found, simulated - (buffer if job.one_sided else 0), rtol=apart)


def test_one_of_four_at_half_speed_is_predicted_as_it_is_planned() -> None:
    workload = random_workload()
    cluster = Cluster(4, 8, **FAST)
    slower = PoolCost((COST, scaled(COST, 2.0, 2.0)), (0, 0, 0, 1))
    job = small_job(
        cluster=cluster, cost=slower, tokens_per_rank=2000, home_factors=(1.0, 1.0, 1.0, 2.0), tolerance=0.01
    )
    # What it takes where the planner knows nothing of the slow one.
    equal = planned(replace(job, cost=COST, home_factors=()), workload)
    found, before = simulate(job, DISTCA, workload), simulate(job, DISTCA, workload, plan=equal)
    plan = planned(job, workload)
    balance = plan.balance()
    level = balance.seconds_after + balance.other_seconds
    assert found.step_s < 0.8 * before.step_s
    # The planner counts linear layers between two attentions: of two layers those of one.
    wanted = job.layers * (level.max(axis=1) + balance.other_seconds.max(axis=1)).sum()
    assert found.step_s == pytest.approx(wanted, rel=0.01)
    attention = sum(server_seconds(each, slower, way) for way, phase in plan.phases for each in phase.plans)
    np.testing.assert_allclose(found.attention_s, job.layers * attention)


def test_gpus_that_nobody_measured_are_derived_from_one_that_was() -> None:
    measured = find_table("NVIDIA H100 80GB HBM3", "flash4", 32, 8, 128)
    assert isinstance(measured, TableCost)
    rows = np.array([8192]), np.array([65_536])
    for name, ratio in (("A100", 989 / 312), ("H20", 989 / 148), ("H100", 1.0)):
        table = derived(measured, GPUS["H100"], GPUS[name])
        assert table.forward(*rows) == pytest.approx(ratio * measured.forward(*rows), rel=1e-6)
    # A range of a long document reads its keys as fast as memory gives them, and no faster.
    slow = replace(GPUS["A100"], bandwidth=1e9)
    tile = np.array([1024]), np.array([131_072])
    read = 2 * 1024 * 8192 + 131_072 * 4096
    assert derived(measured, GPUS["H100"], slow).forward(*tile)[0] >= read / 1e9


def test_what_does_not_go_together_is_a_sentence() -> None:
    with pytest.raises(SimulationError, match="is simulated on GPUs that are all alike"):
        simulate(small_job(4, extra_servers=2), parse_mode("packed"), random_workload())
    with pytest.raises(SimulationError, match="does not divide the 3 GPUs"):
        small_job(4, pp=2, extra_servers=1)
    with pytest.raises(SimulationError, match="has 1 numbers, and there are 4 homes"):
        small_job(4, home_factors=(1.0,))
