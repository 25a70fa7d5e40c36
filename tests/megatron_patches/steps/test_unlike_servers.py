"""A pool of several kinds of GPUs and kernels is planned by the cost table of each."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from distca.attention.reference import ReferenceKernel
from distca.plan import TableCost, analytic_cost
from distca.plan.cost.linear import LinearRate
from distca.plan.cost.pool import PoolCost, at_speeds
from distca.plan.cost.table_file import find_table
from distca.testing.ranks import run_ranks
from megatron_patches.steps.unlike_servers import (
    ServerSort,
    costs_by_sort,
    gb_s_beside_others,
    in_words,
    linear_factors,
    pool_sorts,
    speeds_beside_others,
)
from tests.megatron_patches import small_cases
from tests.plan.cost.test_table_file import write

COST = analytic_cost(8, 4, 8)
NEW, OLD, SLOW = ServerSort("new", "flash4"), ServerSort("old", "torch"), ServerSort("new", "torch")
POOL = (NEW, NEW, OLD, NEW)


def _planned(line: list[str], torch_on: int) -> tuple[Any, np.ndarray]:
    """Of a step on ranks whose last one has an old GPU, and one may take a kernel of another name: costs, and seconds
    of attention by server."""
    small_cases.on_cpu()
    from distca.attention import select
    from distca.train.config.cli import parse_run_config
    from megatron_patches.steps import plan_options
    from tests.train.small_runs import StepByStep

    here: Any = SimpleNamespace(
        name=lambda _: "old" if dist.get_rank() == 2 else "new",
        why_not=lambda name, _: None if name == ("torch" if dist.get_rank() == torch_on else "reference") else "no",
        make=lambda name, _: _named(name),
    )
    plan_options._name = here.name
    select.why_not, select._make = here.why_not, here.make
    run = StepByStep(parse_run_config(line))
    found = run.trainer.cad.options.cost, run.step().balance.seconds_after.sum(axis=0)
    run.close()
    return found


def _named(name: str) -> ReferenceKernel:
    kernel = ReferenceKernel()
    kernel.name = name
    return kernel


def test_an_old_gpu_and_a_slow_kernel_get_less_attention(tmp_path: Path) -> None:
    from tests.train.small_runs import arguments, write_texts

    texts, own = write_texts(tmp_path / "texts"), {"heads": 8, "kv_heads": 4, "head_dim": 8}
    write(tmp_path, device="new", kernel="reference", **own)
    line = arguments(data__path=texts, output=tmp_path, cad__cost_table=tmp_path)
    (alike, _), *_ = run_ranks(3, _planned, line, -1)
    assert isinstance(alike, TableCost)
    write(tmp_path, factor=3.0, device="old", kernel="reference", **own)
    write(tmp_path, factor=2.0, device="new", kernel="torch", **own)
    (cost, seconds), *others = run_ranks(3, _planned, line, 1)
    assert isinstance(cost, PoolCost) and cost.of_server == (0, 1, 2)
    assert seconds.max() < 1.1 * seconds.mean()
    for _, other in others:
        np.testing.assert_array_equal(other, seconds)


def test_a_missing_table_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert costs_by_sort((COST,), [NEW] * 2, lambda _: None, True) == (COST,)
        (found,) = costs_by_sort((COST,), POOL, {OLD: (COST,)}.get, True)
        assert isinstance(found, PoolCost) and found.of_server == (0, 0, 1, 0)
        assert costs_by_sort((COST,), POOL, lambda _: None, False) == (COST,) and not caplog.text
        assert costs_by_sort((COST,), POOL, lambda _: None, True) == (COST,)
    assert "unlike servers (new with flash4, old with torch), and some have no cost table of their own" in caplog.text


def test_a_server_of_several_ranks_counts_with_its_slowest_kernel() -> None:
    assert pool_sorts(1, NEW, [OLD, SLOW]) == [NEW, OLD, SLOW]
    assert pool_sorts(2, NEW, [SLOW, OLD, OLD, SLOW, SLOW]) == [SLOW, OLD, SLOW]
    assert in_words([NEW, SLOW, NEW]) == "new with flash4: 0, 2; new with torch: 1"


def test_servers_are_slower_by_the_number_that_share_a_gpu() -> None:
    assert speeds_beside_others((), 2, []) == speeds_beside_others((), 2, [1, 1]) == ()
    assert speeds_beside_others((), 2, [2, 1]) == (1.0, 1.0, 0.5, 1.0)
    assert speeds_beside_others((0.5, 1.0, 1.0, 2.0), 2, [4, 2]) == (0.5, 1.0, 0.25, 1.0)


def test_servers_on_one_gpu_share_its_network() -> None:
    assert gb_s_beside_others(0.0, 50.0, []) == gb_s_beside_others(0.0, 50.0, [1, 1]) == ()
    assert gb_s_beside_others(0.0, 50.0, [2, 1]) == (25.0, 50.0)
    assert gb_s_beside_others(12.0, 50.0, [4, 1]) == (3.0, 12.0)


def test_linear_layers_and_speeds_go_with_the_table(tmp_path: Path) -> None:
    new, old = (find_table("NVIDIA H200", "flash4", 32, 8, 128) for _ in range(2))
    assert new is not None and old is not None and new.linear is not None
    old.linear = LinearRate(2 * new.linear.forward, 2 * new.linear.backward)
    pool = PoolCost((new, old), (0, 0, 1, 0))
    assert linear_factors(pool, 3) == (1.0, 1.0, 2.0) and linear_factors(new, 3) == (1.0,) * 3
    speeds, rows, servers = (1.0, 0.5, 0.5, 4.0), np.array([512] * 4), np.arange(4)
    seconds = at_speeds(pool, speeds).on_servers("both", rows, 2 * rows, servers)
    np.testing.assert_allclose(seconds * speeds, pool.on_servers("both", rows, 2 * rows, servers))
