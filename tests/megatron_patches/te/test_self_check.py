"""How far off products in FP8 may be: rounding passes, a factor and a wrong column do not."""

from types import SimpleNamespace

import pytest
import torch

from distca.errors import SupportError
from megatron_patches.te import self_check
from megatron_patches.te.self_check import check_products, objection


def _products(dtype: torch.dtype, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A product of rounded operands, and the exact one."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(96, 128, generator=generator) for _ in range(2))
    rounded = [x.to(dtype).double() for x in (a, b)]
    return {"the output": rounded[0] @ rounded[1].t()}, {"the output": a.double() @ b.double().t()}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_rounding_passes(dtype) -> None:
    for seed in range(20):
        assert objection(*_products(dtype, seed), "current") is None


def test_what_bfloat16_does_not_explain_is_refused_there() -> None:
    assert objection(*_products(torch.bfloat16, 0), "none") is None
    assert "the output is 3." in str(objection(*_products(torch.float8_e4m3fn, 0), "none"))


@pytest.mark.parametrize("factor", [0.95, 1.05, float("nan")])
def test_a_factor_is_refused(factor) -> None:
    actual, exact = _products(torch.float8_e4m3fn, 0)
    assert objection({"the output": actual["the output"] * factor}, exact, "current") is not None


def test_columns_of_others_are_refused() -> None:
    actual, exact = _products(torch.float8_e4m3fn, 0)
    actual["the output"][:, :2] = actual["the output"][:, 2:4]
    assert "off float64" in str(objection(actual, exact, "current"))


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ("current", "^`fp8_recipe` is `tensorwise`, but.*: leave `fp8` out, or"),
        ("none", "leave `fp8` out and set `linears` to local, or"),
    ],
)
def test_the_remedy_leaves_out_the_layers_that_are_wrong(monkeypatch, wrong, remedy) -> None:
    monkeypatch.setattr(self_check, "_why_wrong", lambda fp8, *_: "the output is 0" if fp8 == wrong else None)
    with pytest.raises(SupportError, match=remedy):
        check_products(SimpleNamespace(fp8="hybrid", fp8_recipe="tensorwise"), torch.device("cpu"))
