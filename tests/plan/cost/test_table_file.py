import json
import re

import numpy as np
import pytest

from distca.errors import PlanError
from distca.plan import AttentionShape, analytic_cost, load_table
from distca.plan.cost.linear import LinearRate
from distca.plan.cost.table_file import find_table, open_table, table_name, write_table

Q, KV = np.array([128, 1024, 4096]), np.array([128, 4096])


def write(folder, factor=1.0, device="NVIDIA H200", kernel="flash4", heads=32, kv_heads=8, head_dim=128, **others):
    q, kv = np.meshgrid(Q, KV, indexing="ij")
    cost = analytic_cost(heads, kv_heads, head_dim)
    content = {"device": device, "kernel": kernel, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    content |= {"block": 128, "q_rows": Q, "kv_rows": KV}
    for name in ("forward", "backward"):
        content[f"{name}_seconds"] = np.where(q <= kv, factor * getattr(cost, name)(q, kv), np.nan)
    path = folder / table_name(device, kernel, heads, kv_heads, head_dim)
    write_table(path, content | others)
    return path


def test_names():
    assert table_name("NVIDIA H200", "flash4", 32, 8, 128) == "h200_flash4_32x8x128.json"
    assert table_name("NVIDIA A100-SXM4-80GB", "torch", 8, 8, 64) == "a100-sxm4-80gb_torch_8x8x64.json"


def test_written_tables_are_read_again(tmp_path):
    path = write(tmp_path, factor=1.3)
    cost = load_table(path)
    assert cost.forward(np.array(1024), np.array(4096)) == pytest.approx(
        1.3 * analytic_cost(32, 8, 128).forward(np.array(1024), np.array(4096)), rel=1e-5
    )
    content = json.loads(path.read_text())
    assert content["forward_seconds"][2][0] is None
    assert max(len(line) for line in path.read_text().splitlines()) < 200


def test_right_file_is_found(tmp_path):
    write(tmp_path, factor=2.0)
    write(tmp_path, factor=9.0, kernel="torch")
    write(tmp_path, factor=9.0, device="NVIDIA H100")
    write(tmp_path, factor=9.0, head_dim=64)
    write(tmp_path, factor=9.0, kv_heads=4)
    found = find_table("NVIDIA H200", "flash4", 32, 8, 128, folder=tmp_path)
    assert found is not None
    expected = 2 * analytic_cost(32, 8, 128).backward(np.array(128), np.array(4096))
    assert found.backward(np.array(128), np.array(4096)) == pytest.approx(expected, rel=1e-5)
    for missing in [("NVIDIA H20", "flash4", 32, 8, 128), ("NVIDIA H200", "flash4", 32, 16, 128)]:
        assert find_table(*missing, folder=tmp_path) is None


def test_bytes_are_those_of_the_numbers_that_travel(tmp_path):
    path = write(tmp_path, value_bytes=4)
    of_bfloat16 = (
        find_table("NVIDIA H200", "flash4", 32, 8, 128, value_bytes=2, folder=tmp_path),
        open_table(path, 32, 8, 128, value_bytes=2),
    )
    for cost in of_bfloat16:
        assert cost.shape == AttentionShape(32, 8, 128, value_bytes=2)
        np.testing.assert_array_equal(cost.forward(Q, Q), load_table(path).forward(Q, Q))
    assert load_table(path).shape.value_bytes == 4


def test_seconds_scale_with_heads_from_the_nearest_number(tmp_path):
    write(tmp_path, factor=2.0, heads=32, kv_heads=8)
    write(tmp_path, factor=3.0, heads=8, kv_heads=2)
    found = find_table("NVIDIA H200", "flash4", 4, 1, 128, folder=tmp_path)
    assert found is not None and (found.shape.heads, found.shape.kv_heads) == (4, 1)
    q, kv = np.array([128, 1024]), np.array([4096, 4096])
    np.testing.assert_allclose(found.forward(q, kv), 3 / 2 * analytic_cost(8, 2, 128).forward(q, kv), rtol=1e-5)


def test_linear_layers_in_fp8_take_their_part_of_the_time(tmp_path):
    linear = {"hidden": 4096, "ffn": 14336, "forward_s_per_token": 6e-7, "backward_s_per_token": 12e-7}
    rate = load_table(write(tmp_path, linear=linear | {"fp8": {"current": 0.6}})).linear
    assert rate is not None and rate.in_fp8("none") == LinearRate(rate.forward, rate.backward)
    assert rate.in_fp8("delayed") is None
    quick = rate.in_fp8("current")
    assert quick is not None and (quick.forward, quick.backward) == (0.6 * rate.forward, 0.6 * rate.backward)
    for wrong in ({"current": "half"}, [0.6], {"current": None}, {"current": -0.6}):
        path = write(tmp_path, linear=linear | {"fp8": wrong})
        with pytest.raises(PlanError, match="its fp8 has a value that is no number above 0"):
            load_table(path)


def test_incomplete_tables_are_refused(tmp_path):
    path = write(tmp_path)
    content = json.loads(path.read_text())
    del content["q_rows"]
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError, match="lacks q_rows"):
        find_table("NVIDIA H200", "flash4", 32, 8, 128, folder=tmp_path)
    path.write_text("{")
    with pytest.raises(PlanError, match="is not JSON"):
        find_table("NVIDIA H200", "flash4", 32, 8, 128, folder=tmp_path)


@pytest.mark.parametrize("key", ["heads", "kv_heads", "head_dim", "value_bytes", "block"])
@pytest.mark.parametrize("wrong", [0, -8, 1.5, "32", True, None, 2**40])
def test_sizes_that_are_none_are_refused(tmp_path, key, wrong):
    path = write(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: wrong}))
    said = f"has {key} {wrong!r}, which must be a whole number of at least 1"
    with pytest.raises(PlanError, match=re.escape(said)):
        load_table(path)
    with pytest.raises(PlanError, match=re.escape(said)):
        find_table("NVIDIA H200", "flash4", 32, 8, 128, folder=tmp_path)


@pytest.mark.parametrize("key", ["q_rows", "kv_rows"])
@pytest.mark.parametrize("wrong", [[None], [[128]], [], 128, ["x"], [10**400]])
def test_axes_that_are_none_are_refused(tmp_path, key, wrong):
    path = write(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: wrong}))
    said = r"must be increasing numbers of at least 1|something else where numbers should be|asks? for"
    with pytest.raises(PlanError, match=said):
        load_table(path)


@pytest.mark.parametrize("wrong", [0, -1e-7, "1", None, [1e-7], 10**400])
def test_linear_rates_that_are_none_are_refused(tmp_path, wrong):
    linear = {"hidden": 4096, "ffn": 14336, "forward_s_per_token": 6e-7, "backward_s_per_token": 12e-7}
    for key in ("forward_s_per_token", "hidden"):
        with pytest.raises(PlanError, match="linear is no object with hidden"):
            load_table(write(tmp_path, linear=linear | {key: wrong}))


def test_shipped_tables_are_found_by_their_names():
    from distca.plan.cost.table_file import TABLES

    for path in TABLES.glob("*.json"):
        content = json.loads(path.read_text())
        key = [content[name] for name in ("device", "kernel", "heads", "kv_heads", "head_dim")]
        window = content.get("window", 0)
        assert path.name == table_name(*key, window)
        assert find_table(*key, window=window) is not None
