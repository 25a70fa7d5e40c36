from dataclasses import replace

import numpy as np
import pytest

from distca.plan import AttentionShape, TableCost, analytic_cost
from distca.plan.cost.table import LoadFactors
from distca.profile.calibration import LENGTHS, load_factors, smoothed
from distca.profile.grid import Grid
from distca.profile.validation import random_batch

SHAPE = AttentionShape(32, 8, 128)
AXIS = 2.0 ** np.arange(6, 18)
GRID = Grid(
    tuple(AXIS.astype(int).tolist()), (*AXIS.astype(int).tolist(), 262144), 128, 6e-3, 8, 0.25, 0.09, 2.0, 792,
    524_288, 1_048_576,
)  # fmt: skip
BASE = analytic_cost(32, 8, 128)


def table(load=None):
    rows = np.meshgrid(AXIS, AXIS, indexing="ij")
    seconds = (np.where(rows[0] <= rows[1], of(*rows), np.nan) for of in (BASE.forward, BASE.backward))
    return TableCost(SHAPE, AXIS, AXIS, *seconds, load=load)


@pytest.mark.parametrize("noise, off", [(0.0, 0.007), (0.01, 0.02)])
def test_true_factors_are_found(noise, off):
    truth = LoadFactors(LENGTHS, np.array([1.10, 1.12, 1.04, 1.03]), np.array([1.05, 1.08, 1.02, 1.02]))
    cost, true, random = table(), table(truth), np.random.default_rng(1)
    batches = [random_batch(GRID, cost, 25e-3, seed) for seed in range(24)]
    forward, backward = (
        np.array([of(*tasks).sum() for tasks in batches]) * np.exp(noise * random.standard_normal(24))
        for of in (true.forward, true.backward)
    )
    found = load_factors(cost, batches, forward, backward)
    np.testing.assert_allclose(found.forward, truth.forward, atol=off + 0.015)
    others = [random_batch(GRID, cost, 25e-3, seed) for seed in range(100, 120)]
    for name in ("forward", "backward"):
        predicted = [getattr(table(found), name)(*tasks).sum() for tasks in others]
        np.testing.assert_allclose(predicted, [getattr(true, name)(*tasks).sum() for tasks in others], rtol=off)


def test_batches_that_are_alike_give_one_factor_for_all_lengths():
    tasks = np.full(100, 8192), np.full(100, 8192)
    cost = table()
    forward, backward = (
        np.full(4, factor * of(*tasks).sum()) for factor, of in ((1.1, cost.forward), (1.05, cost.backward))
    )
    found = load_factors(cost, [tasks] * 4, forward, backward)
    np.testing.assert_allclose(found.forward, 1.1, rtol=1e-12)
    np.testing.assert_allclose(found.backward, 1.05, rtol=1e-12)


def test_random_batches_are_as_varied_as_servers_are():
    short, dominated = 0, 0
    for seed in range(40):
        q, kv = random_batch(GRID, BASE, 25e-3, seed)
        assert (q >= 1).all() and (q <= kv).all() and kv.max() <= GRID.kv_rows[-1]
        assert (q + GRID.tile).sum() <= GRID.most_q_rows + GRID.tile and kv.sum() <= GRID.most_kv_rows
        seconds = BASE.forward(q, kv)
        assert len(q) > 3
        assert seconds.sum() == pytest.approx(25e-3, rel=0.25) or (q + GRID.tile).sum() > 0.9 * GRID.most_q_rows
        short += kv.max() <= 8192
        dominated += seconds.max() > 0.5 * seconds.sum()
    assert short >= 4 and dominated >= 4, (short, dominated)


def test_random_batches_are_no_larger_than_memory():
    small = replace(GRID, most_kv_rows=65_536)
    for seed in range(40):
        assert random_batch(small, BASE, 25e-3, seed)[1].sum() <= small.most_kv_rows


def test_smoothing_halves_noise_and_keeps_what_is_smooth():
    random = np.random.default_rng(0)
    rows = np.meshgrid(AXIS, AXIS, indexing="ij")
    base = BASE.forward(*rows)
    whole = rows[0] == rows[1]
    truth = base * (rows[0] / 1024) ** 0.05 * (rows[1] / 1024) ** -0.03 * np.where(whole, 1.1, 1.0)
    truth[rows[0] > rows[1]] = np.nan
    np.testing.assert_allclose(smoothed(truth, base, AXIS, AXIS, 1.0, 64), truth, rtol=1e-9)
    noisy = truth * np.exp(0.03 * random.standard_normal(truth.shape))
    found = smoothed(noisy, base, AXIS, AXIS, 1.0, 256)
    np.testing.assert_array_equal(found[AXIS < 256], noisy[AXIS < 256])
    off = np.log(found / truth)[AXIS >= 256]
    assert np.nanstd(off) < 0.55 * 0.03
    np.testing.assert_array_equal(smoothed(noisy, base, AXIS, AXIS, 0.0, 64), noisy)
