"""Cost tables of layers with windows: what is measured, and who finds it."""

import json
import shutil

import numpy as np
import pytest
import torch

from distca.commands.main import main
from distca.errors import PlanError
from distca.plan import AttentionShape
from distca.plan.cost.table_file import find_table, open_table, table_name
from distca.plan.kinds import AttentionKind
from distca.profile import measure
from distca.profile.grid import points
from distca.profile.timing import route_of_tasks
from tests.profile.machine import TINY

SMALL = ["--heads", "2", "--kv_heads", "1", "--head_dim", "8", "--hidden", "16", "--ffn", "32"]


def test_a_task_reads_the_keys_that_its_queries_see():
    route = route_of_tasks(np.array([3, 5]), np.array([70, 8]), AttentionKind(1.0, 10), torch.device("cpu"))
    assert route.kv_rows == (3 + 9) + 8 and route.q_rows == 8
    assert route.batches[0].batch.borders_kv.tolist() == [0, 12, 20]


def test_points_beyond_the_window_are_measured_once():
    from dataclasses import replace

    grid, shape = replace(TINY, window=100), AttentionShape(2, 1, 8)
    at = {(TINY.q_rows[each.at[0]], TINY.kv_rows[each.at[1]]) for each in points(grid, shape)}
    assert {kv for q, kv in at if q == 16} == {16, 64, 128}  # 115 keys are seen
    assert {kv for q, kv in at if q == 128} == {128, 256}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU rehearsal")
def test_a_table_of_a_window_is_found_by_its_window_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "grid_for", lambda device, shape: TINY)
    main(["profile", "--ranks", "1", "--window", "100", *SMALL])
    path = tmp_path / "cpu_reference_2x1x8_w100.json"
    assert path.name == table_name("cpu", "reference", 2, 1, 8, 100)
    content = json.loads(path.read_text())
    assert content["window"] == 100 and content["linear"] is content["links"] is None
    assert find_table("cpu", "reference", 2, 1, 8, folder=tmp_path) is None
    assert find_table("cpu", "reference", 2, 1, 8, window=101, folder=tmp_path) is None
    cost = find_table("cpu", "reference", 4, 2, 8, window=100, folder=tmp_path)
    assert cost is not None and cost.window == 100
    q, kv = np.full(3, 16), np.array([256, 512, 4096])
    assert np.ptp(cost.forward(q, kv)) < 0.1 * cost.forward(q, kv).mean()
    assert cost.of_few("forward", [16], [256])[0] == pytest.approx(cost.forward(q[:1], kv[:1]).tolist())
    assert np.allclose(cost.forward(np.full(20, 16), np.full(20, 256)), cost.forward(q[:1], kv[:1]))
    shutil.copy(path, tmp_path / "other.json")
    with pytest.raises(PlanError, match="with a window of 100"):
        open_table(tmp_path / "other.json", 2, 1, 8)
