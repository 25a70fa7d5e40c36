"""What plans count with: the measured table of the device and kernel, one that the caller names, or a model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distca.errors import PlanError
from distca.plan import AttentionShape, CostModel, TableCost, analytic_cost
from distca.plan.cost.analytic import AnalyticCost
from distca.plan.cost.linear import LinearRate
from distca.plan.cost.pool import at_speeds
from distca.plan.cost.table_file import find_table
from distca.testing.ranks import run_ranks
from tests.megatron_patches import small_cases
from tests.plan.cost.test_table_file import write

TP = 2
GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank of a world that, as it were, has two tensor-parallel ones."""
    from megatron.core import parallel_state

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: TP)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _cost(
    heads: tuple[int, int, int], kernel: str, dtype: torch.dtype, device: torch.device, table: Any = None
) -> CostModel:
    from megatron_patches.steps.cost_models import cost_model
    from megatron_patches.steps.unlike_servers import ServerSort

    config: Any = SimpleNamespace(
        num_attention_heads=heads[0], num_query_groups=heads[1], kv_channels=heads[2], params_dtype=dtype
    )
    return cost_model(config, ServerSort("cpu" if device == CPU else "NVIDIA H200", kernel), table)


@pytest.mark.usefixtures("one_rank")
def test_table_or_analytic_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_patches.steps import cost_models

    folder = tmp_path / "tables"
    monkeypatch.setattr(cost_models, "find_table", lambda *key, **named: find_table(*key, folder=folder, **named))
    heads = (32, 8, 128)
    assert _cost(heads, "flash4", torch.bfloat16, GPU) == analytic_cost(16, 4, 128)
    write(folder, factor=2.0)
    cost = _cost(heads, "flash4", torch.bfloat16, GPU)
    assert isinstance(cost, TableCost)
    assert (cost.shape.heads, cost.shape.kv_heads) == (16, 4)
    assert cost.forward(np.array(128), np.array(4096)) == pytest.approx(
        2 * float(analytic_cost(16, 4, 128).forward(np.array(128), np.array(4096))), rel=1e-5
    )
    assert isinstance(_cost(heads, "reference", torch.float32, GPU), AnalyticCost)


@pytest.mark.usefixtures("one_rank")
def test_cpu_ranks_plan_with_the_table_of_cpus() -> None:
    cost = _cost((4, 2, 32), "reference", torch.float32, CPU)
    assert isinstance(cost, TableCost) and cost.shape == AttentionShape(2, 1, 32, 4)
    assert _cost((4, 2, 32), "reference", torch.bfloat16, CPU).shape == AttentionShape(2, 1, 32, 2)
    # A query of a short document takes longer than its share of pairs says: whole blocks of scores are computed.
    short, long = cost.forward(np.array([64, 4096]), np.array([64, 4096])) / np.array([64, 4096]) ** 2
    assert short > 1.5 * long
    assert isinstance(_cost((32, 8, 128), "reference", torch.float32, CPU), AnalyticCost)


@pytest.mark.usefixtures("one_rank")
def test_a_named_table_of_other_heads_is_refused_in_a_sentence(tmp_path: Path) -> None:
    table = write(tmp_path, heads=32, kv_heads=4)
    for heads in ((32, 8, 128), (32, 4, 64)):
        with pytest.raises(PlanError) as refused:
            _cost(heads, "flash4", torch.bfloat16, GPU, table)
        said = str(refused.value)
        assert f"{table} was measured for 32 query heads, 4 key/value heads and head size 128" in said
        assert f"a rank of this model has {heads[0] // TP}, {heads[1] // TP} and {heads[2]}" in said
        assert "\n" not in said and said.endswith("`distca profile`.")
    with pytest.raises(PlanError, match="nor the package has a cost table for NVIDIA H200 with torch, 16 query"):
        _cost((32, 8, 128), "torch", torch.bfloat16, GPU, str(tmp_path))
    found = _cost((32, 4, 128), "flash4", torch.bfloat16, GPU, str(tmp_path))
    assert isinstance(found, TableCost) and (found.shape.heads, found.shape.kv_heads) == (16, 2)


@pytest.mark.usefixtures("one_rank")
def test_pipelines_level_attention_with_linear_layers_in_fp8(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import parallel_state

    from megatron_patches.steps.layer_work import layer_works
    from megatron_patches.steps.plan_options import _non_attention

    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 2)
    config: Any = SimpleNamespace(
        num_attention_heads=32, num_query_groups=8, kv_channels=128, hidden_size=4096, ffn_hidden_size=14336,
        num_layers=8, recompute_granularity=None, fp8=None, fp8_recipe="tensorwise", gated_linear_unit=True,
        num_moe_experts=None,
    )  # fmt: skip
    cost = find_table("NVIDIA H200", "flash4", 16, 4, 128)
    assert cost is not None and cost.linear is not None
    works = partial(layer_works, config, "", False)
    plain = _non_attention(config, cost, "time", True, works)
    config.gated_linear_unit = False
    ungated = _non_attention(config, cost, "time", True, works)
    assert plain is not None and ungated is not None
    weights = 4096 * 128 * 80 + 3 * 4096 * 14336
    assert ungated.forward == pytest.approx(plain.forward * (1 - 4096 * 14336 / weights))
    config.gated_linear_unit = True
    config.fp8 = "hybrid"
    quick = _non_attention(config, cost, "time", True, works)
    assert plain is not None and quick is not None
    factor = cost.linear.fp8["current"]
    assert (quick.forward, quick.backward) == pytest.approx((factor * plain.forward, factor * plain.backward))
    assert "bfloat16" not in caplog.text
    cost.linear = LinearRate(cost.linear.forward, cost.linear.backward)
    assert _non_attention(config, cost, "time", True, works) == plain
    assert "as if linear layers were in bfloat16" in caplog.text


def _planned_with(line: list[str]) -> tuple[CostModel, float]:
    """A run's costs, and what its first step's plan counts for attention at home."""
    small_cases.on_cpu()
    from distca.train.config.cli import parse_run_config
    from tests.train.small_runs import StepByStep

    run = StepByStep(parse_run_config(line))
    answer = run.trainer.cad.options.cost, float(run.step().balance.seconds_before.sum())
    run.close()
    return answer


def test_a_run_plans_with_the_table_that_it_names(tmp_path: Path) -> None:
    from tests.train.small_runs import arguments, write_texts

    texts = write_texts(tmp_path / "texts")
    found = []
    for factor in (1.0, 3.0):
        table = write(
            tmp_path / str(factor), factor=factor, device="cpu", kernel="reference", heads=8, kv_heads=4, head_dim=8
        )
        line = arguments(data__path=texts, output=tmp_path, cad__cost_table=table)
        found.append(run_ranks(1, _planned_with, line)[0])
    (cost, once), (_, thrice) = found
    assert isinstance(cost, TableCost) and (cost.shape.heads, cost.shape.kv_heads) == (4, 2)
    q, kv = np.array(128), np.array(4096)
    expected = float(analytic_cost(8, 4, 8).forward(q, kv)) / 2
    assert float(cost.forward(q, kv)) == pytest.approx(expected, rel=1e-5)
    assert thrice == pytest.approx(3 * once, rel=1e-5)


def test_a_slower_server_is_planned_as_one_that_takes_longer() -> None:
    from megatron_patches.steps.plan_options import check_speeds

    cost, speeds, rows = analytic_cost(8, 2, 64), (1.0, 0.5, 1.0, 4.0), np.array([512] * 4)
    check_speeds(speeds, 4)
    seconds = at_speeds(cost, speeds).on_servers("both", rows, 2 * rows, np.arange(4))
    np.testing.assert_allclose(seconds * speeds, cost.per_direction("both", rows, 2 * rows))
    for wrong in ((1.0,), (1.0, 1.0, 1.0, 0.0), (1.0, 1.0, 1.0, float("nan"))):
        with pytest.raises(PlanError, match="give one number above 0 for each of the pool's 4 servers"):
            check_speeds(wrong, 4)
