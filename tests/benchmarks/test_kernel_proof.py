"""The proof of kernels, rehearsed without a GPU: what it counts as expected, and what it does not."""

from typing import Any

import pytest

from benchmarks import kernel_proof


def _dim(**fields: Any) -> dict[str, Any]:
    return {"objection": None, "excess": 0.2, "made_wrong": {}, "auto": "flash4", "seeds_refused": []} | fields


def _parts(**dims: dict[str, Any]) -> dict[str, Any]:
    wrong = _dim(objection="dq is wrong", auto="torch")
    found = {"128": _dim(made_wrong={"dV x 1.05": "dv is off"}), "48": wrong, "8": wrong}
    return {
        "head_dims": found | {name.removeprefix("dim_"): out for name, out in dims.items()},
        "kinds": {"window 100, head dimension 64": {"objection": None, "off_by_one": "o is off"}},
        "variants": {"deterministic, head dimension 64": {"objection": None}},
        "operations": {"refused": {}},
        "starts": [{"objection": None}] * 20,
        "start_seconds": {"before": [{"seconds": 1.0}] * 3, "with the check": [{"seconds": 1.5}] * 3},
    }


def test_what_was_measured_is_as_expected() -> None:
    summary = kernel_proof._summary(_parts(), "flash4")
    assert summary["as_expected"]
    assert summary["made_wrong"] == 2 and summary["starts"] == 20
    assert summary["start_s"] == {"before": 1.0, "with the check": 1.5}


@pytest.mark.parametrize(
    ("dim", "out", "named"),
    [
        ("128", _dim(objection="o is off"), "right_refused"),
        ("128", _dim(auto="torch"), "right_not_taken"),
        ("128", _dim(seeds_refused=["o is off"]), "seeds_refused"),
        ("128", _dim(made_wrong={"dV x 1.05": None}), "made_wrong_not_refused"),
        ("48", _dim(auto="torch"), "wrong_not_refused"),
        ("48", _dim(objection="o is off"), "wrong_taken"),
    ],
)
def test_anything_else_is_named(dim: str, out: dict[str, Any], named: str) -> None:
    summary = kernel_proof._summary(_parts(**{f"dim_{dim}": out}), "flash4")
    assert summary[named] and not summary["as_expected"]


def test_cases_run_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_proof, "SEEDS", 2)
    found = kernel_proof._run_job({"what": "dim", "dim": 16}, "reference")
    assert found["objection"] is None and found["seeds_refused"] == [] and all(found["made_wrong"].values())
    kind = kernel_proof._run_job({"what": "kind", "kind": "window 100", "dim": 16}, "reference")
    assert kind["objection"] is None and "off the reference" in kind["off_by_one"]
    for checked in (False, True):
        assert kernel_proof._run_job({"what": "seconds", "checked": checked, "dim": 16}, "reference")["seconds"] > 0
