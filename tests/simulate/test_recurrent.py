"""Hybrid stacks: cores, halos and summaries are those of the routes that the runtime takes; baselines by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import simulated_servers
from distca.baselines import BaselineError, parse_mode
from distca.models.hybrid import Hybrid
from distca.plan import StepPlan, analytic_cost
from distca.plan.cost.linear import LayerWork, LinearRate, between_attentions
from distca.plan.cost.pool import PoolCost
from distca.plan.cost.recurrent import core_weights
from distca.plan.recurrence import Recurrence
from distca.plan.recurrent.routes import piece_routes
from distca.simulate import Cluster, Job, SimulationError, Workload, dense, simulate
from distca.simulate.baseline_recurrent import row_bytes
from distca.simulate.cad import planned
from distca.simulate.job import VALUE
from distca.simulate.memory import at_home
from distca.simulate.simulation import _cad_memory
from distca.train.config.cli import parse_run_config
from distca.train.run.memory import predict_memory
from tests.simulate.cases import NOTHING_ELSE, documents, pair_cost

NET = Hybrid(pattern="G-*-", key_heads=2, value_heads=4, key_dim=4, value_dim=8)
LENGTHS = np.random.default_rng(5).integers(1, 700, size=24)
CONFIGURATION = str(Path(__file__).parents[2] / "configs" / "qwen3.5-9b-like-cut.yaml")


def job_of(gpus: int = 4, *, pp: int = 1, pattern: str = "G-*-", times: int = 1, **options: Any) -> Job:
    cluster = options.pop("cluster", None) or Cluster(gpus, 2)
    hybrid = replace(NET, pattern=pattern)
    model = dense(len(pattern) * pp * times, 16, 32, 2, 2, 8, vocabulary=8, hybrid=hybrid)
    options = {"tokens_per_rank": 2000, "rates": NOTHING_ELSE, "level_time": False} | options
    return Job(model, cluster, options.pop("cost", pair_cost()), pp=pp, **options)


def drawn(ranks: int) -> Workload:
    return Workload.draw(LENGTHS, 700, ranks, 2000, 2, seed=1)


def of_routes(job: Job, plan: StepPlan) -> tuple[float, float]:
    """Bytes that all ranks send in one recurrent layer of all micro-batches, and seconds of its cores, both by the
    routes of every rank."""
    what, core = job.recurrence, job.core
    sent = seconds = 0.0
    for layouts, rank in product(plan.layouts, range(job.data_parallel)):
        for route in piece_routes(layouts, rank, what.halo_rows):
            for way in (route.forward, route.backward):
                sent += way.states.send.total * what.state_bytes + way.transitions.send.total * what.transition_bytes
            sent += 2 * VALUE * what.channels * route.halo.exchange.send.total
            rows = route.end - route.begin
            seconds += float(rows.sum()) * (core.forward + core.backward)
            seconds += 2 * core.forward * float(rows[~route.opens & ~route.closes].sum())
    return sent, seconds


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("pp", [1, 2])
def test_pieces_are_computed_and_summaries_travel_as_routes_say(pp: int, servers: int) -> None:
    job, workload = job_of(4 + servers, pp=pp, times=2, extra_servers=servers), drawn(4 // pp)
    plan = planned(job, workload)
    found = simulate(job, parse_mode("distca"), workload, plan=plan)
    sent, seconds = of_routes(job, plan)
    assert sent > 0
    layers, rows = 2 * pp, sum(each.tokens for each in workload.micro_batches)
    passed = 2 * rows * job.model.hidden * VALUE * (pp > 1)
    assert found.sent_bytes.sum() == pytest.approx(layers * (plan.balance().bytes_moved / pp + sent) + passed)
    linear = 3e-9 * job.model.matmul_weights * rows
    assert found.busy_s.sum() == pytest.approx(found.attention_s.sum() + linear + layers * seconds)
    assert (found.memory_bytes > 0).all() and found.step_s >= found.busy_s.max()
    # Servers without a model have no part in recurrent layers.
    assert (found.attention_s > 0).all()
    np.testing.assert_allclose(found.busy_s[4:], found.attention_s[4:])


def test_a_core_takes_as_long_as_its_weights() -> None:
    what = Recurrence.gated_delta_net(16, 32, 128, 128)
    cost = analytic_cost(16, 4, 256).linear
    assert cost is not None
    # 32,768 rows on an H200.
    assert 32_768 * cost.forward * core_weights(what).forward == pytest.approx(1.89e-3, rel=0.02)
    assert 32_768 * cost.backward * core_weights(what).backward == pytest.approx(5.70e-3, rel=0.02)
    assert core_weights(Recurrence.mamba2(16, 32, 128, 128)).forward < core_weights(what).forward


@pytest.mark.parametrize("mode", ["packed", "packed-dealt", "cp2", "cp2-keep", "ulysses2", "ring2"])
def test_baselines_compute_every_row_once_and_exchange_heads(mode: str) -> None:
    job, workload = job_of(), drawn(4)
    without = job_of(pattern="*-", times=1)
    found, attention = (simulate(each, parse_mode(mode), workload) for each in (job, without))
    rows = sum(each.tokens for each in workload.micro_batches)
    linear, core = 3e-9 * job.model.matmul_weights * rows, (job.core.forward + job.core.backward) * rows
    assert found.busy_s.sum() == pytest.approx(found.attention_s.sum() + linear + core)
    assert found.attention_s.sum() == pytest.approx(attention.attention_s.sum(), rel=0.02)
    if "packed" in mode:
        assert not found.sent_bytes.any()
        return
    # There and back, forward and backward; half of the rows of a group of two stay.
    there, back = 2 * (32 + 2 * 32 + 2 * 4 - 16), 2 * 32
    assert row_bytes(job) == (there, back)
    more = found.sent_bytes.sum() - attention.sent_bytes.sum()
    assert more == pytest.approx(2 * (there + back) * rows / 2, rel=0.01)
    free = simulate(replace(job, move_heads=False), parse_mode(mode), workload)
    assert free.sent_bytes.sum() == pytest.approx(attention.sent_bytes.sum(), rel=0.01)


def test_megatron_moves_32_kib_of_a_row_of_qwen() -> None:
    hybrid = Hybrid(pattern="G-G-G-*-", key_heads=16, value_heads=32, output_gate=True)
    model = dense(8, 4096, 12288, 16, 4, 256, hybrid=hybrid)
    job = Job(model, Cluster(8), analytic_cost(16, 4, 256))
    there, back = row_bytes(job)
    assert there - 2 * 2 * 32 + back == 32 * 1024
    with pytest.raises(BaselineError, match=r"cp32 shares heads .* over 32 ranks, which do not divide the 16 key"):
        simulate(replace(job, cluster=Cluster(64)), parse_mode("cp32"), documents([(100, 0)], bins=1))


def test_slow_links_show_in_recurrent_layers_and_fast_ones_do_not() -> None:
    workload = documents([(7000, 0), (300, 0)], bins=1)
    for mode in ("distca", "cp4"):
        steps = []
        for rate in (1e-4, 1e-2, 100):
            job = job_of(cluster=Cluster(4, 1, network_gb_s=rate, network_latency_us=0), pattern="GGG*")
            model = replace(job.model, hybrid=replace(job.model.hybrid, key_heads=4))
            job = replace(job, cost=pair_cost(1e-9), model=model)
            steps.append(simulate(job, parse_mode(mode), workload))
        assert steps[0].step_s > steps[1].step_s > steps[2].step_s
        assert steps[0].exposed_share > 0.2 > 0.01 > steps[2].exposed_share


def test_summaries_can_count_as_nothing() -> None:
    job = replace(job_of(cluster=Cluster(4, 1, network_gb_s=1e-3), pattern="GGG*"), cost=pair_cost(1e-9))
    model = replace(job.model, hybrid=replace(job.model.hybrid, key_dim=64, value_dim=64))
    job = replace(job, model=model)
    workload, mode = documents([(7000, 0), (300, 0)], bins=1), parse_mode("distca")
    steps = [simulate(replace(job, move_summaries=moves), mode, workload) for moves in (True, False)]
    assert steps[0].step_s > 1.1 * steps[1].step_s and (steps[0].sent_bytes > steps[1].sent_bytes).all()


def test_what_lies_beside_attention_by_hand() -> None:
    # The first attention's own layer, over two attentions and two ranks.
    found = between_attentions(LinearRate(1.0, 2.0), [LayerWork(20, 6), LayerWork(24, 6)], 2)
    assert (found.forward, found.backward) == (20 / 4, (2 * 20 + 6) / 4)
    net, full = (job_of(4, pp=2, pattern=pattern, times=2, level_time=True) for pattern in ("GG*-", "*-"))
    assert net.non_attention == full.non_attention is not None


def test_servers_get_no_attention_for_time_in_which_recurrent_layers_run() -> None:
    (workload,) = simulated_servers.workloads("pretrain", 128, 1)
    alone, served = (simulated_servers.job_of("qwen3.5-9b", servers, "H100") for servers in (0, 16))
    mode = parse_mode("distca")
    assert simulate(served, mode, workload).step_s < 0.95 * simulate(alone, mode, workload).step_s


@pytest.mark.parametrize(("tp", "recompute"), [(1, "none"), (1, "mlp"), (2, "mlp"), (1, "all")])
def test_packed_documents_need_what_the_trainer_predicts(tp: int, recompute: str) -> None:
    words = ["--parallel.tp", str(tp), "--train.recompute", recompute, "--cad.enabled", "false"]
    config = parse_run_config(["--config", CONFIGURATION, *words])
    (stage,) = predict_memory(config, 8, 32_000)
    part = config.model.attention_shape(tp)
    cost = analytic_cost(part.heads, part.kv_heads, part.head_dim)
    job = Job(config.model, Cluster(8), cost, tp=tp, recompute=recompute)  # type: ignore[arg-type]
    rows = np.array([131_072])
    assert at_home(job, rows, rows, np.zeros(1), 1)[0] == pytest.approx(stage.total, rel=0.03)


def test_states_are_kept_and_summaries_arrive() -> None:
    """Of a document over all ranks each keeps states, by its pieces, and gets summaries."""
    job = job_of(pattern="G-*-", tokens_per_rank=100)
    plan = planned(job, documents([(400, 0)], bins=1))
    what = job.recurrence
    routes = [piece_routes(plan.layouts[0], rank, what.halo_rows) for rank in range(4)]
    states = [sum(int((~half.opens).sum()) for half in route) * what.state_bytes for route in routes]
    between = [sum(int((~x.opens & ~x.closes).sum()) for x in route) * what.transition_bytes for route in routes]
    ways = [
        [
            sum(
                getattr(half, way).states.destination_rows * what.state_bytes
                + getattr(half, way).transitions.destination_rows * what.transition_bytes
                for half in route
            )
            for way in ("forward", "backward")
        ]
        for route in routes
    ]
    wanted = np.array(states) + between + np.max(ways, axis=1)
    whole = documents([(100, rank) for rank in range(4)], bins=4)
    apart = planned(job, replace(whole, whole=True))
    assert wanted.max() > 0
    # The same rows at home; keys and values differ.
    assert (_cad_memory(job, plan) - _cad_memory(job, apart)).max() >= wanted.max()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pattern": "GG"}, "its pattern is 'GG', without attention"),
        ({"tp": 2, "pattern": "G*", "key_heads": 1}, "`tp` is 2, which does not divide the 1 key heads"),
        ({"cost": PoolCost((pair_cost(), pair_cost(1.0)), (0, 0, 0, 1))}, "homes that are alike"),
        ({"pattern": "GG**GG", "pp": 2}, "unequal layers"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    pattern, heads = options.pop("pattern", "G*"), options.pop("key_heads", 2)
    model = dense(len(pattern), 16, 32, 2, 2, 8, vocabulary=8, hybrid=replace(NET, pattern=pattern, key_heads=heads))
    with pytest.raises(SimulationError, match=said):
        Job(model, **{"cluster": Cluster(4), "cost": pair_cost()} | options)
