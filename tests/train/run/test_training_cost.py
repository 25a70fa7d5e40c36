"""Training plans with the measured table of its GPU and kernel, where there is one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distca.plan import AttentionShape, TableCost, analytic_cost
from distca.plan.cost.analytic import AnalyticCost
from distca.plan.cost.table_file import find_table
from distca.train.run import builder
from tests.plan.cost.test_table_file import write

CONFIG = SimpleNamespace(
    model=SimpleNamespace(heads=32, kv_heads=8, resolved_head_dim=128), parallel=SimpleNamespace(tp=2)
)

GPU = torch.device("cuda")


@pytest.fixture
def one_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_table_or_analytic_model(tmp_path, monkeypatch):
    folder = tmp_path / "tables"
    monkeypatch.setattr(builder, "find_table", lambda *key: find_table(*key, folder=folder))
    kernel = SimpleNamespace(name="flash4")
    assert builder._cost(CONFIG, kernel, torch.bfloat16, GPU) == analytic_cost(16, 4, 128)
    write(folder, factor=2.0)
    cost = builder._cost(CONFIG, kernel, torch.bfloat16, GPU)
    assert isinstance(cost, TableCost)
    assert (cost.shape.heads, cost.shape.kv_heads) == (16, 4)
    assert cost.forward(np.array(128), np.array(4096)) == pytest.approx(
        2 * float(analytic_cost(16, 4, 128).forward(128, 4096)), rel=1e-5
    )
    assert isinstance(builder._cost(CONFIG, SimpleNamespace(name="reference"), torch.float32, GPU), AnalyticCost)


@pytest.mark.usefixtures("one_rank")
def test_cpu_ranks_plan_with_the_table_of_cpus():
    tiny = SimpleNamespace(
        model=SimpleNamespace(heads=4, kv_heads=2, resolved_head_dim=32), parallel=SimpleNamespace(tp=2)
    )
    reference, cpu = SimpleNamespace(name="reference"), torch.device("cpu")
    cost = builder._cost(tiny, reference, torch.float32, cpu)
    assert isinstance(cost, TableCost) and cost.shape == AttentionShape(2, 1, 32, 4)
    # A query of a short document takes longer than its share of pairs says: whole blocks of scores are computed.
    short, long = cost.forward(np.array([64, 4096]), np.array([64, 4096])) / np.array([64, 4096]) ** 2
    assert short > 1.5 * long
    assert isinstance(builder._cost(CONFIG, reference, torch.float32, cpu), AnalyticCost)
