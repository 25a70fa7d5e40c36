"""What cannot be simulated is said in a sentence."""

import json
from dataclasses import replace

import numpy as np
import pytest

from distca.errors import BaselineError
from distca.plan import analytic_cost, area_cost
from distca.plan.cost.linear import LinearRate
from distca.simulate import MODELS, Cluster, Job, SimulationError, Workload, dense, load_rates
from distca.simulate.kernel_rate import at_rate, forward_tflops
from distca.simulate.rates import RATES
from distca.simulate.sweep import run_mode
from tests.simulate.cases import pair_cost, small_job


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": 12}, "`gpus` is 12, which nodes of 8 do not divide"),
        ({"gpus": 0}, "`gpus` is 0"),
        ({"gpus": 8, "network_gb_s": 0}, "`network_gb_s` is 0; it must be above 0"),
        ({"gpus": 8, "nvlink_gb_s": float("nan")}, "`nvlink_gb_s` is nan"),
        ({"gpus": 8, "network_latency_us": -1}, "`network_latency_us` is -1"),
        ({"gpus": 8, "memory_gib": 0}, "`memory_gib` is 0"),
    ],
)
def test_clusters(options: dict, said: str):
    with pytest.raises(SimulationError, match=said):
        Cluster(**options)


def test_jobs():
    for options, said in (
        ({"tp": 2}, "The cost table is for 2 query heads"),
        ({"tp": 3}, "`tp` is 3, which does not divide the 2 query heads"),
        ({"pp": 3, "gpus": 4}, "does not divide the 4 GPUs"),
        ({"recompute": "some"}, "choose one of none, mlp, all"),
        ({"micro_batches": 0}, "`micro_batches` is 0"),
        ({"ep": 0}, "`ep` is 0; it must be at least 1"),
        ({"cost": area_cost(2, 2, 8)}, "no linear layers"),
        ({"fp8": "e4m3"}, "choose one of none, current, delayed, blockwise"),
        ({"fp8": "current"}, "`fp8` is current, but the cost table does not say"),
        ({"moments": "float16"}, "`moments` is 'float16'; choose one of float32, bfloat16"),
        ({"cost": pair_cost(heads=4)}, "The cost table is for 4 query heads, 2 key/value heads"),
    ):
        with pytest.raises(SimulationError, match=said):
            small_job(**options)
    for widths, said in (
        ((16, 24, 2, 2, 8), "part of the MLP is 24, which is not a multiple of 16; change the model's sizes or `tp`"),
        ((24, 32, 2, 2, 8), "the hidden size is 24"),
    ):
        with pytest.raises(SimulationError, match=f"`fp8` is current, but .*{said}"):
            Job(dense(2, *widths), Cluster(2), pair_cost(), fp8="current")
    with pytest.raises(SimulationError, match="`tp` is 2, which does not divide the model's ffn of 33; choose one"):
        Job(dense(2, 16, 33, 2, 2, 8), Cluster(2), pair_cost(heads=1, kv_heads=1), tp=2)
    with pytest.raises(SimulationError, match="does not divide the 3 layers"):
        Job(dense(3, 16, 32, 2, 2, 8), Cluster(2), pair_cost(), pp=2)
    with pytest.raises(SimulationError, match="stays inside a node"):
        Job(MODELS["8b"], Cluster(8, 4), pair_cost(), tp=8)


def test_workloads():
    with pytest.raises(SimulationError, match="has 50 tokens, but the context is 40"):
        Workload.draw(np.array([50]), 40, 2, 100, 1, 0)
    with pytest.raises(SimulationError, match="does not fit into 2 data-parallel ranks of 100 tokens"):
        Workload.draw(np.array([50]), 400, 2, 100, 1, 0)


def test_rates(tmp_path):
    (tmp_path / "rates.json").write_text('{"rates": {}}')
    with pytest.raises(SimulationError, match="lack a number"):
        load_rates(tmp_path / "rates.json")
    (tmp_path / "rates.json").write_bytes(b"\xff")
    with pytest.raises(SimulationError, match=r"`rates` .* are no text"):
        load_rates(tmp_path / "rates.json")
    with pytest.raises(SimulationError, match="cannot be read"):
        load_rates(tmp_path / "none.json")
    shipped = json.loads(RATES.read_text())
    for name, value, said in (
        ("linear_factor", "NaN", "lack a number .it has the number NaN"),
        ("step_s", "Infinity", "lack a number .it has the number Infinity"),
        ("copy_bytes_per_s", "0", "have copy_bytes_per_s 0; it must be above 0"),
    ):
        shipped["rates"][name]["value"], kept = "there", shipped["rates"][name]["value"]
        (tmp_path / "rates.json").write_text(json.dumps(shipped).replace('"there"', value))
        shipped["rates"][name]["value"] = kept
        with pytest.raises(SimulationError, match=said):
            load_rates(tmp_path / "rates.json")
    (tmp_path / "rates.json").write_text("[" * 100_000)
    with pytest.raises(SimulationError, match="lack a number"):
        load_rates(tmp_path / "rates.json")


def test_kernels_at_another_rate():
    scaled = at_rate(pair_cost(), 0.5)
    assert forward_tflops(scaled) == pytest.approx(0.5)
    both = (
        scaled.per_direction("both", np.array([5]), np.array([9])),
        pair_cost().per_direction("both", np.array([5]), np.array([9])),
    )
    assert (both[0] / both[1]).ravel() == pytest.approx([forward_tflops(pair_cost()) / 0.5] * 2)
    with pytest.raises(SimulationError, match="`attention_tflops` is 0"):
        at_rate(pair_cost(), 0)


def test_too_little_memory_names_what_would_take_less_and_is_possible():
    cost = analytic_cost(16, 2, 128)
    cost = replace(cost, linear=LinearRate(1e-15, 2e-15, {}))
    options = {"tp": 2, "recompute": "all", "tokens_per_rank": 131_072}
    for ep, ways in ((1, " or raise `tp` or raise `pp` or raise `ep`"), (8, " or raise `tp`")):
        job = Job(MODELS["qwen3-30b-a3b"], Cluster(8, memory_gib=20), cost, ep=ep, **options)
        workload = Workload.draw(np.full(8, 131_072), 131_072, job.data_parallel, job.tokens_per_rank, 1, 0)
        with pytest.raises(BaselineError, match=f"a GPU has 20; lower `tokens_per_rank`{ways}.$"):
            run_mode(job, "best-cp", [workload])
