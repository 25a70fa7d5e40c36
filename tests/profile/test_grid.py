from types import SimpleNamespace

import numpy as np
import pytest
import torch

from distca.plan import AttentionShape, analytic_cost
from distca.profile.grid import Grid, grid_for, points

SHAPE = AttentionShape(32, 8, 128)
STEPS = (64, 128, 1024, 16384, 131072)
GRID = Grid(STEPS, (*STEPS, 262144), 128, 6e-3, 8, 0.25, 90e-3, 2.0, 792, 500_000, 1_000_000)


def test_every_point_has_a_full_batch_that_memory_holds():
    cost = analytic_cost(32, 8, 128)
    found = points(GRID, SHAPE)
    for point in found:
        q, kv = GRID.q_rows[point.at[0]], GRID.kv_rows[point.at[1]]
        tasks = len(point.q_rows)
        assert (point.q_rows + GRID.tile).sum() <= GRID.most_q_rows + GRID.tile * tasks / 2
        assert point.kv_rows.sum() <= GRID.most_kv_rows + GRID.tile * tasks / 2
        assert (point.kv_rows >= point.q_rows).all() and (point.q_rows > 0).all()
        full = cost.forward(point.q_rows, point.kv_rows).sum() >= 0.9 * GRID.fill_s
        held = min(GRID.most_q_rows // (q + GRID.tile), GRID.most_kv_rows // kv)
        assert full or tasks == held
        assert point.forward_full == (tasks * 32 * -(-q // 128) >= GRID.tiles)
    assert len({point.at for point in found}) == len(found)


def test_points_that_take_too_long_are_left_out():
    at = {(GRID.q_rows[p.at[0]], GRID.kv_rows[p.at[1]]) for p in points(GRID, SHAPE)}
    assert (131072, 131072) in at
    assert (16384, 262144) in at
    assert (131072, 262144) not in at
    assert (1024, 128) not in at


@pytest.mark.parametrize("rows", [64, 1024])
def test_whole_documents_have_lengths_around_the_point(rows):
    (point,) = [p for p in points(GRID, SHAPE) if GRID.q_rows[p.at[0]] == rows == GRID.kv_rows[p.at[1]]]
    assert (point.q_rows == point.kv_rows).all()
    assert np.unique(point.q_rows).size > 7
    assert abs(point.q_rows.mean() - rows) <= 8
    assert point.q_rows.min() == rows - min(64, rows // 2)
    assert point.q_rows.max() < rows + 64


@pytest.mark.parametrize("heads", [(4, 2, 32), (32, 8, 128)])
def test_a_cpu_measures_every_length_in_a_few_minutes(heads):
    shape = AttentionShape(*heads, 4)
    grid, cost = grid_for(torch.device("cpu"), shape), analytic_cost(*heads, value_bytes=4)
    found = points(grid, shape)
    assert {grid.kv_rows[point.at[1]] for point in found} == set(grid.kv_rows)
    assert all(point.forward_full for point in found)
    # A core takes some 30,000 times the model's seconds, and for backward over twice those of forward.
    seconds = sum(point.rounds * 1e5 * cost.forward(point.q_rows, point.kv_rows).sum() for point in found)
    assert 60 < seconds < 300


@pytest.mark.parametrize("shape", [AttentionShape(40, 40, 128), AttentionShape(128, 128, 192, value_dim=128)])
def test_a_gpu_has_a_point_for_every_number_of_keys_also_with_wide_rows(shape, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (79 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    grid = grid_for(torch.device("cuda", 0), shape)
    assert {grid.kv_rows[point.at[1]] for point in points(grid, shape) if point.forward_full} == set(grid.kv_rows)
