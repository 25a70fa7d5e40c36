"""Rows that travel to experts and back, counted by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.calibration_runs import RESULTS
from benchmarks.measured_runs import run_of, workloads_of
from distca.baselines import parse_mode
from distca.errors import SimulationError
from distca.models.experts import Experts
from distca.plan.cost.pool import PoolCost
from distca.simulate import Cluster, Job, dense, load_rates, simulate
from distca.simulate.experts import exchange_of_experts
from distca.simulate.memory import at_home, static_bytes
from distca.train.config.cli import parse_run_config
from distca.train.run.memory import predict_memory
from tests.simulate.cases import NOTHING_ELSE, documents, pair_cost

EXPERTS = Experts(count=8, topk=2, ffn=8)
MODEL = dense(2, hidden=16, ffn=32, heads=2, kv_heads=2, head_dim=8, vocabulary=8, experts=EXPERTS)
BATCH = documents([(400, 0), (100, 1), (300, 2), (200, 3)], bins=4)
ROW = 16 * 2 + 4 * 2  # bytes, with its scores
AT_TWO, AT_FOUR = 1 - 1 / 2**2, 1 - (3 / 4) ** 2
"""The share of rows with one of their two experts on a given one of two ranks, and of four."""

UNLIKE = PoolCost((pair_cost(), pair_cost(2e-6)), (0, 0, 1, 0))


def job_of(gpus: int = 4, gpus_per_node: int = 2, **options: object) -> Job:
    cluster = Cluster(
        gpus, gpus_per_node, nvlink_gb_s=2e-3, network_gb_s=1e-3, nvlink_latency_us=0.0, network_latency_us=0.0
    )
    options = {"tokens_per_rank": 1000, "rates": NOTHING_ELSE, "cost": pair_cost()} | options
    return Job(MODEL, cluster, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ep, once, seconds",
    [
        (1, False, 0.0),
        (2, False, 100 * ROW * AT_TWO / 2e6),  # to the other rank, over NVLink
        (4, False, 100 * ROW * 2 * AT_FOUR / 1e6),  # to two ranks over the network
        (4, True, 100 * ROW * 0.75 / 1e6),  # three rows of four have an expert on the other node
    ],
)
def test_an_exchange_takes_what_its_bytes_take(ep: int, once: bool, seconds: float) -> None:
    found, size = exchange_of_experts(job_of(ep=ep, once_per_node=once), np.array([100.0, 0, 0, 0]))
    assert found[0] == pytest.approx(seconds) and not found[1:].any()
    assert (size[0] > 0) == (ep > 1)


def test_with_tensor_parallelism_each_gpu_sends_its_share() -> None:
    [found, *_], _ = exchange_of_experts(job_of(tp=2, ep=2, cost=pair_cost(heads=1, kv_heads=1)), np.full(2, 100.0))
    assert found == pytest.approx(50 * ROW * AT_TWO / 2e6)


@pytest.mark.parametrize("mode", ["distca", "packed", "cp2"])
def test_experts_are_computed_once_and_shared_evenly(mode: str) -> None:
    """Work is that of the weights that a token is multiplied by, wherever experts are; exchanges only add waits."""
    alone, shared = (simulate(job_of(ep=ep), parse_mode(mode), BATCH) for ep in (1, 4))
    linear = 3e-9 * MODEL.matmul_weights * 1000
    for found in (alone, shared):
        assert found.busy_s.sum() == pytest.approx(found.attention_s.sum() + linear)
    assert shared.step_s > alone.step_s
    assert shared.exposed_s.sum() > alone.exposed_s.sum()


def test_a_stage_without_experts_computes_none_in_1f1b() -> None:
    model = replace(MODEL, experts=replace(EXPERTS, dense_layers=1))
    job = Job(model, Cluster(2), pair_cost(), pp=2, tokens_per_rank=1000, rates=NOTHING_ELSE)
    first, second = simulate(job, parse_mode("packed"), documents([(400, 0)], bins=1)).busy_s
    assert second - first == pytest.approx(400 * model.routed_weights * model.units * 3e-9)


@pytest.mark.parametrize("ep", [1, 2])
def test_tensor_parallel_ranks_with_the_same_experts_reduce_their_gradients(ep: int) -> None:
    job = job_of(gpus=2, tp=2, ep=ep, cost=pair_cost(heads=1, kv_heads=1))
    assert job.data_parallel == 1
    assert (simulate(job, parse_mode("packed"), documents([(400, 0)], bins=1)).reduction_s > 0) == (ep == 1)


def test_blocking_exchanges_are_waited_for_in_every_layer_both_ways() -> None:
    job = job_of(ep=4)
    once, again = (simulate(replace(job, recompute=how), parse_mode("packed"), BATCH) for how in ("none", "mlp"))
    # 400 rows of the fullest rank, there and back, forward and backward of two layers
    exchanges = 8 * 400 * ROW * 2 * AT_FOUR / 1e6
    assert once.step_s == pytest.approx(once.busy_s[0] + exchanges + once.reduction_s)
    assert again.step_s == pytest.approx(again.busy_s[0] + 1.5 * exchanges + again.reduction_s)


def test_halves_hide_each_others_exchanges() -> None:
    exposed, hidden = (simulate(job_of(ep=4, hide_experts=hide), parse_mode("distca"), BATCH) for hide in (False, True))
    assert hidden.step_s < exposed.step_s
    assert hidden.busy_s == pytest.approx(exposed.busy_s)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"ep": 3}, "`ep` is 3; it must divide the 8 experts and the 4 GPUs of a stage"),
        ({"ep": 8}, "`ep` is 8; it must divide the 8 experts and the 4 GPUs of a stage"),
        ({"home_factors": (1.0, 2.0, 1.0, 1.0)}, "homes are not alike, but experts count as if all homes were"),
        ({"cost": UNLIKE}, "homes are not alike, but experts count as if all homes were"),
        ({"fp8": "current"}, "`fp8` is current, but experts are computed in bfloat16"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(SimulationError) as refused:
        job_of(**options)
    assert said in str(refused.value)


def test_a_dense_model_has_no_expert_ranks() -> None:
    with pytest.raises(SimulationError, match="`ep` is 2, but the model has no experts"):
        Job(replace(MODEL, experts=Experts()), Cluster(4), pair_cost(), ep=2)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("pp, ep", [(1, 2), (1, 4), (2, 2)])
def test_servers_without_a_model_have_no_experts(pp: int, ep: int, hidden: bool) -> None:
    """Two servers, which four expert-parallel ranks do not divide."""
    homes = 4 * pp
    usual: dict[str, object] = {"ep": ep, "pp": pp, "hide_experts": hidden}
    job = job_of(homes + 2, extra_servers=2, **usual)
    alone = job_of(homes, **usual)
    assert (static_bytes(job), job.expert_replicas) == (static_bytes(alone), alone.expert_replicas)
    found, without = (simulate(each, parse_mode("distca"), BATCH) for each in (job, alone))
    assert (found.attention_s[homes:] > 0).all()
    np.testing.assert_allclose(found.busy_s[homes:], found.attention_s[homes:])
    linear = [each.busy_s[:homes] - each.attention_s[:homes] for each in (found, without)]
    np.testing.assert_allclose(*linear)
    # Where servers are so slow that they get nothing, homes take as long as without them.
    even = documents([(250, rank) for rank in range(4)], bins=4)
    slow = PoolCost((pair_cost(), pair_cost(1.0)), (0,) * homes + (1,) * 2)
    idle, busy = (simulate(each, parse_mode("distca"), even) for each in (replace(job, cost=slow), alone))
    assert not idle.attention_s[homes:].any()
    assert idle.step_s == pytest.approx(busy.step_s)


@pytest.mark.parametrize("recompute", ["none", "mlp", "all"])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b-cut", "moonlight-16b-a3b-like"])
def test_memory_is_what_the_trainer_predicts(name: str, recompute: str) -> None:
    line = ["--config", f"configs/{name}.yaml", "--cad.enabled", "false", "--train.recompute", recompute]
    config = parse_run_config(line)
    [stage] = predict_memory(config, 8, config.model.vocabulary)
    cost = pair_cost(heads=32, kv_heads=4)
    cost = replace(cost, shape=config.model.attention_shape())
    tokens, ep = config.data.tokens_per_rank, config.parallel.ep
    job = Job(config.model, Cluster(8), cost, ep=ep, tokens_per_rank=tokens, recompute=recompute)  # type: ignore[arg-type]
    assert static_bytes(job) == pytest.approx(stage.model.held, rel=1e-3)
    rows = np.array([tokens])
    assert at_home(job, rows, rows, np.zeros(1), 1)[0] == pytest.approx(stage.total, rel=0.03)


@pytest.mark.parametrize("mode, nano_batches", [("packed", 1), ("distca", 2)])
def test_the_host_is_waited_for_in_each_layer_with_experts_and_nano_batch(mode: str, nano_batches: int) -> None:
    slow = replace(NOTHING_ELSE, expert_layer_s=1.0)
    for ep in (1, 4):
        jobs = (job_of(ep=ep, rates=rates) for rates in (slow, NOTHING_ELSE))
        found, without = (simulate(job, parse_mode(mode), BATCH) for job in jobs)
        assert found.step_s - without.step_s == pytest.approx(2 * nano_batches, rel=0.01)
        assert found.busy_s == pytest.approx(without.busy_s)


def test_experts_take_what_was_measured() -> None:
    """Two and four H200: seconds of a median step, and those in which GPUs computed: kernels of all kinds but
    communication, the mean over ranks."""
    apart = []
    for gpus in (2, 4):
        content = json.loads((RESULTS / f"experts_a3b_cut_{gpus}_gpus.json").read_text())
        for cell in content["cells"].values():
            drawn = workloads_of(content, cell)
            for mode, figures in cell["modes"].items():
                found = run_of("", content, cell, mode, drawn).predicted(load_rates())
                ratios = [each.step_s / took for each, took in zip(found, figures["steps_s"], strict=True)]
                assert np.median(ratios) == pytest.approx(1, abs=0.03)
                measured = [each["busy_s"] for each in figures["traced"]]
                apart.append(found[0].busy_s.mean() / np.mean(measured) - 1)
    assert max(map(abs, apart)) < 0.05 and abs(np.mean(apart)) < 0.01
