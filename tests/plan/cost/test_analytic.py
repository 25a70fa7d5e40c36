import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.errors import PlanError
from distca.plan import AttentionShape, TableCost, analytic_cost, area_cost, load_table
from distca.plan.cost.analytic import cost_of_kind
from distca.plan.cost.scaled import scaled
from distca.plan.cost.table import LoadFactors
from distca.plan.kinds import AttentionKind

# Measured on one H200 with flash-attn-4 (32 heads, 8 k,v heads, d 128, causal): q rows, k,v rows, TFLOP/s fwd and bwd.
MEASURED = [
    (32768, 32768, 650, 589),
    (2048, 32768, 702, 492),
    (512, 32768, 617, 392),
    (256, 32768, 594, 298),
    (128, 32768, 652, 185),
    (8192, 8192, 607, 527),
    (1024, 1024, 315, 292),
]
rows = st.integers(1, 60_000)


def flops(q: np.ndarray, kv: np.ndarray) -> np.ndarray:
    return 4 * 32 * 128 * q * (kv - (q - 1) / 2)


def table(q_rows: list[int], kv_rows: list[int], factor: float = 1.3) -> TableCost:
    q, kv = np.meshgrid(np.array(q_rows, float), np.array(kv_rows, float), indexing="ij")
    base = analytic_cost(4, 2, 64)
    wobble = factor + 0.1 * np.sin(q + kv)
    return TableCost(
        base.shape,
        q_rows,
        kv_rows,
        np.where(q <= kv, base.forward(q, kv) * wobble, np.nan),
        np.where(q <= kv, base.backward(q, kv) * wobble, np.nan),
    )


def test_analytic_model_reproduces_the_measured_rates() -> None:
    q, kv, forward, backward = (np.array(x) for x in zip(*MEASURED, strict=True))
    cost = analytic_cost(32, 8, 128)
    np.testing.assert_allclose(flops(q, kv) / cost.forward(q, kv) / 1e12, forward, rtol=0.09)
    np.testing.assert_allclose(2.5 * flops(q, kv) / cost.backward(q, kv) / 1e12, backward, rtol=0.065)


@given(st.lists(rows, min_size=2, max_size=5), st.sampled_from(("forward", "backward")))
def test_cutting_never_makes_the_analytic_cost_less(cuts: list[int], direction: str) -> None:
    edges = np.unique(cuts)
    whole = analytic_cost(8, 2, 64).per_direction(direction, edges[-1:] - edges[:1], edges[-1:])
    parts = analytic_cost(8, 2, 64).per_direction(direction, np.diff(edges), edges[1:])
    assert parts.sum() >= whole.sum() * (1 - 1e-12)


def test_no_queries_cost_nothing() -> None:
    for cost in (analytic_cost(8, 2, 64), area_cost(), table([1, 64], [64, 512])):
        assert (cost.per_direction("both", np.zeros(2, int), np.array([0, 512])) == 0).all()


def test_a_window_leaves_the_shape_of_heads() -> None:
    measured = scaled(analytic_cost(16, 16, 192, value_dim=128), 2.0, 2.0)
    assert cost_of_kind(AttentionKind(1.0, window=1024), measured).shape == measured.shape


def test_a_window_leaves_a_scaled_formula_a_formula() -> None:
    kind, q = AttentionKind(1.0, window=64), np.array([1000])
    seconds = cost_of_kind(kind, area_cost(4, 2, 32)).per_direction("both", q, q)
    slower = cost_of_kind(kind, scaled(area_cost(4, 2, 32), 2.0, 3.0)).per_direction("both", q, q)
    np.testing.assert_allclose(slower, seconds * [[2.0], [3.0]])


@given(st.lists(st.tuples(rows, rows), min_size=1, max_size=5))
def test_both_directions_are_forward_and_backward(pairs: list[tuple[int, int]]) -> None:
    q, kv = (np.array(x) for x in zip(*[(min(p), max(p)) for p in pairs], strict=True))
    for cost in (analytic_cost(8, 2, 64), table([1, 64, 512], [64, 512, 4096])):
        both = cost.per_direction("both", q, kv)
        np.testing.assert_allclose(both[0], cost.forward(q, kv))
        np.testing.assert_allclose(both[1], cost.backward(q, kv))
        assert (both > 0).all()
        assert (cost.least("both", q, kv) <= both * (1 + 1e-12)).all()


def with_null(seconds: np.ndarray) -> list[list[float | None]]:
    return [[None if np.isnan(value) else float(value) for value in row] for row in seconds]


def test_table_is_exact_at_measured_points_and_between_them_in_between() -> None:
    cost = table([64, 128, 512], [64, 512, 4096])
    base = analytic_cost(4, 2, 64)
    q, kv = np.array([64, 64, 128, 512, 512]), np.array([64, 512, 512, 512, 4096])
    np.testing.assert_allclose(cost.forward(q, kv), base.forward(q, kv) * (1.3 + 0.1 * np.sin(q + kv)))
    inside = cost.forward(np.array([200]), np.array([1000])) / base.forward(np.array([200]), np.array([1000]))
    assert 1.2 <= inside[0] <= 1.4
    beyond = cost.forward(np.array([5000]), np.array([50_000])) / base.forward(np.array([5000]), np.array([50_000]))
    np.testing.assert_allclose(beyond, 1.3 + 0.1 * np.sin(512 + 4096))


def test_table_between_its_points_is_bilinear_in_the_logarithms() -> None:
    from scipy.interpolate import RegularGridInterpolator

    log_q, log_kv = np.arange(6, 11), np.arange(10, 19)
    points = np.meshgrid(2.0**log_q, 2.0**log_kv, indexing="ij")
    base, random = analytic_cost(32, 8, 128), np.random.default_rng(0)
    factors = {name: 1 + 0.2 * random.random(points[0].shape) for name in ("forward", "backward")}
    seconds = [getattr(base, name)(*points) * factor for name, factor in factors.items()]
    cost = TableCost(base.shape, 2.0**log_q, 2.0**log_kv, *seconds)
    kv = np.exp2(random.uniform(4, 20, 5000)).astype(int)
    q = np.exp2(np.log2(kv) * random.random(5000)).astype(int)
    at = np.clip(np.log2(q), 6, 10), np.clip(np.log2(kv), 10, 18)
    for name, factor in factors.items():
        wanted = getattr(base, name)(q, kv) * RegularGridInterpolator((log_q, log_kv), factor)(at)
        np.testing.assert_allclose(getattr(cost, name)(q, kv), wanted, rtol=5e-3)
        np.testing.assert_allclose(getattr(cost, name)(*points), getattr(base, name)(*points) * factor, rtol=1e-12)


@given(st.lists(st.tuples(st.integers(0, 60_000), st.integers(0, 400_000)), min_size=1, max_size=8))
def test_few_ranges_cost_what_they_cost_among_many(ranges: list[tuple[int, int]]) -> None:
    measured = table([128, 512, 2048, 8192], [512, 2048, 8192, 65536])
    q = np.array([q for q, _ in ranges])
    kv = q + np.array([before for _, before in ranges])
    for cost, direction in product((measured, analytic_cost(32, 8, 128)), ("forward", "backward", "both")):
        few = cost.of_few(direction, q.tolist(), kv.tolist())
        many = cost.per_direction(direction, np.tile(q, 9), np.tile(kv, 9))
        np.testing.assert_allclose(np.tile(few, 9), many, rtol=1e-12)


def test_a_table_file_reads_back(tmp_path: Path) -> None:
    made = table([64, 512], [64, 512])
    q, kv = np.array([[64, 64], [512, 512]]), np.array([[64, 512], [64, 512]])
    content = {
        "heads": 4, "kv_heads": 2, "head_dim": 64, "block": 32, "q_rows": [64, 512], "kv_rows": [64, 512],
        "forward_seconds": [[None if a > b else float(made.forward(np.array([a]), np.array([b]))[0])
                             for a, b in zip(x, y, strict=True)] for x, y in zip(q, kv, strict=True)],
        "backward_seconds": [[None if a > b else 1.0 for a, b in zip(x, y, strict=True)]
                             for x, y in zip(q, kv, strict=True)],
    }  # fmt: skip
    path = tmp_path / "table.json"
    path.write_text(json.dumps(content))
    cost = load_table(path)
    assert cost.block == 32
    assert cost.shape == AttentionShape(4, 2, 64)
    points = np.array([64, 64, 512]), np.array([64, 512, 512])
    np.testing.assert_allclose(cost.forward(*points), made.forward(*points))
    np.testing.assert_allclose(cost.backward(*points), 1.0)
    del content["heads"]
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError, match="lacks heads"):
        load_table(path)


def test_load_factors_multiply_by_length_and_bound_from_below(tmp_path: Path) -> None:
    axes = 2.0 ** np.arange(6, 15)
    base = analytic_cost(4, 2, 64)
    rows = np.meshgrid(axes, axes, indexing="ij")
    seconds = [np.where(rows[0] <= rows[1], of(*rows), np.nan) for of in (base.forward, base.backward)]
    load = LoadFactors(np.array([256.0, 4096.0]), np.array([1.2, 0.9]), np.array([1.1, 1.0]))
    plain, cost = (TableCost(base.shape, axes, axes, *seconds, load=each) for each in (None, load))
    kv = np.array([64, 256, 1024, 4096, 16384, 100_000])
    q = np.minimum(kv, 700)
    for name, factors in (("forward", [1.2, 1.2, 1.05, 0.9, 0.9, 0.9]), ("backward", [1.1, 1.1, 1.05, 1, 1, 1])):
        np.testing.assert_allclose(getattr(cost, name)(q, kv), getattr(plain, name)(q, kv) * factors, rtol=1e-12)
    many = np.arange(1, 20_000, 7)
    assert (cost.least("both", many, many) <= cost.per_direction("both", many, many) * (1 + 1e-12)).all()
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64, "q_rows": axes.tolist(), "kv_rows": axes.tolist()}
    content = shape | {
        f"{name}_seconds": table for name, table in zip(("forward", "backward"), map(with_null, seconds), strict=True)
    }
    content["load_factors"] = {name: getattr(load, name).tolist() for name in ("kv_rows", "forward", "backward")}
    (tmp_path / "table.json").write_text(json.dumps(content))
    np.testing.assert_allclose(load_table(tmp_path / "table.json").forward(q, kv), cost.forward(q, kv))


@pytest.mark.parametrize(
    "kv_rows, forward, words",
    [([4, 2], [1, 1], "load_factors must be increasing numbers of at least 1"),
     ([2, 4], [1, 0], "one positive forward factor"),
     ([2, 4], [1], "for each of the 2 kv_rows")],
)  # fmt: skip
def test_unusable_load_factors_are_sentences(kv_rows: list, forward: list, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        LoadFactors(np.array(kv_rows, float), np.array(forward, float), np.ones(2))


@pytest.mark.parametrize(
    "q_rows, kv_rows, seconds, words",
    [
        ([2, 1], [4, 8], np.ones((2, 2)), "q_rows must be increasing numbers of at least 1"),
        ([1, 2], [4, 4], np.ones((2, 2)), "kv_rows must be increasing numbers of at least 1"),
        ([1, 2], [4, 8], np.ones((2, 3)), "shape"),
        ([1, 2], [4, 8], np.zeros((2, 2)), "positive"),
        ([1, 2], [4, 8], np.array([[np.nan, 1], [np.nan, 1]]), "every kv_rows"),
    ],
)
def test_unusable_tables_are_sentences(q_rows: list, kv_rows: list, seconds: np.ndarray, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        TableCost(AttentionShape(2, 1, 64), q_rows, kv_rows, seconds, seconds)


def test_moved_bytes() -> None:
    shape = AttentionShape(32, 8, 128)
    assert shape.moved_bytes("forward") == (16384, 4096)
    assert shape.moved_bytes("both") == (32768, 8192)
    # resend: o and lse come home in forward; q, o, dO, lse go out again and dQ comes back.
    assert shape.moved_bytes("forward", resend=True) == (16384 + 128, 4096)
    assert shape.moved_bytes("backward", resend=True) == (32768 + 128, 8192)
    narrow = AttentionShape(32, 32, 192, value_dim=128)
    q, o, kv = 32 * 192 * 2, 32 * 128 * 2, 32 * (192 + 128) * 2
    assert narrow.moved_bytes("forward") == narrow.moved_bytes("backward") == (q + o, kv)
    assert narrow.moved_bytes("backward", resend=True) == (2 * (q + o) + 128, 2 * kv)
    with pytest.raises(PlanError, match="multiple of kv_heads"):
        AttentionShape(30, 8, 128)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((3, 2, 8), "heads must be a positive multiple of kv_heads"),
        ((4, 2, 0), "head_dim and value_bytes at least 1"),
        ((4, 2, 8, 2, -1), "value_dim is -1; it must be from 0 to the keys' size 8"),
        ((4, 2, 8, 2, 9), "value_dim is 9; it must be from 0 to the keys' size 8"),
    ],
)
def test_unusable_heads_are_sentences(sizes: tuple[int, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        AttentionShape(*sizes)
