"""Fused operations that are wrong are not run any more, and right ones are never refused."""

import logging
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from distca.ops import self_check, triton
from distca.ops.gate import SWIGLU, Gate
from distca.ops.self_check import Widths, check_operations
from distca.testing.ranks import run_ranks

CPU, WIDTHS = (
    torch.device("cpu"),
    Widths(96, 80, 4, 2, 24, (40,), Gate(1.702, 1.0, 7.0), experts=True, expert_biases=True, head_norms=True),
)


@pytest.fixture(autouse=True)
def _trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_refused", set())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_right_operations_are_never_refused(dtype) -> None:
    for seed in range(3):
        for run in self_check._operations(WIDTHS).values():
            assert self_check.why_wrong(run, dtype, CPU, seed) is None


def test_tensors_have_names_that_fit_into_a_sentence() -> None:
    draw = self_check.Draw(torch.Generator(), CPU, torch.float32, torch.float32)
    names = [name for run in self_check._operations(WIDTHS).values() for name in run(draw)]
    assert "the output of a head" in names and all(name == " ".join(name.split()) for name in names)


_swiglu, _rms_norm, _rotate = self_check.swiglu, self_check.rms_norm, self_check.split_and_rotate
_statistics, _gradient, _add = self_check.row_statistics, self_check.logits_to_gradient_, self_check.add_product
_row_dots = self_check.row_dots
_expert_sums, _grouped_linear = self_check.expert_sums, self_check.grouped_linear
_add_biases, _router_linear = self_check.add_biases, self_check.router_linear
_expert_numbers = self_check.expert_numbers


def _wrong(name):
    """(attribute, function) of an operation that is wrong in all types but float64."""

    def rms_norm(x, weight, epsilon):
        return _rms_norm(x, weight, epsilon + (0.05 if x.dtype != torch.float64 else 0))

    def rotate(mixed, rotation, groups, *norms):
        q, kv = _rotate(mixed, rotation, groups, *norms)
        return (q, kv) if mixed.dtype == torch.float64 else (q.roll(1, 1), kv)

    def row_rotated_late(mixed, rotation, groups, *norms):
        q, kv = _rotate(mixed, rotation, groups, *norms)
        if mixed.dtype != torch.float64:
            q = torch.cat((q[:-1], q[-1:] * 1.2))
        return q, kv

    def gradient(logits, targets, lse, weights):
        _gradient(logits, targets - int(logits.dtype != torch.float64), lse, weights)

    def statistics(logits, targets):
        maximum, total, target = _statistics(logits, targets)
        return maximum, total * (1.001 if logits.dtype != torch.float64 else 1), target

    def add(total, a, b):
        _add(total, a * (1.01 if a.dtype != torch.float64 else 1), b)

    def swiglu(x, factors=None, gate=SWIGLU):
        return _swiglu(x if x.dtype == torch.float64 else x.roll(40, -1), factors, gate)

    def factors_of_others(x, factors=None, gate=SWIGLU):
        return _swiglu(x, factors if factors is None or x.dtype == torch.float64 else factors.roll(1), gate)

    def without_limit(x, factors=None, gate=SWIGLU):
        return _swiglu(x, factors, gate if x.dtype == torch.float64 else replace(gate, limit=0.0))

    def of_other_pairs(x, pairs):
        return _expert_sums(x, pairs if x.dtype == torch.float64 else pairs.roll(1))

    def as_of_bfloat16(x, weight):
        logits = _router_linear(x, weight)
        return logits if x.dtype == torch.float64 else logits.bfloat16().float()

    def off_by_one(chosen, topk):
        numbers = _expert_numbers(chosen, topk)
        numbers[-1, 0] += 1
        return numbers

    def of_the_next_expert(x, weights, groups, into_main_grad):
        return _grouped_linear(
            x, weights if x.dtype == torch.float64 else weights[1:] + weights[:1], groups, into_main_grad
        )

    def of_the_next_bias(x, biases, groups, scale):
        return _add_biases(x, biases if x.dtype == torch.float64 else biases[1:] + biases[:1], groups, scale)

    def sums(a, b):
        return _row_dots(a, b) * (1.001 if a.dtype != torch.float64 else 1)

    return {
        "RMSNorm": ("rms_norm", rms_norm),
        "rotation": ("split_and_rotate", rotate),
        "rotation of one row": ("split_and_rotate", row_rotated_late),
        "cross-entropy": ("logits_to_gradient_", gradient),
        "cross-entropy by its sum": ("row_statistics", statistics),
        "weight gradients": ("add_product", add),
        "SwiGLU": ("swiglu", swiglu),
        "SwiGLU of other factors": ("swiglu", factors_of_others),
        "SwiGLU without its limit": ("swiglu", without_limit),
        "row sums": ("row_dots", sums),
        "expert sums": ("expert_sums", of_other_pairs),
        "router products": ("router_linear", as_of_bfloat16),
        "expert numbers": ("expert_numbers", off_by_one),
        "expert gradients": ("grouped_linear", of_the_next_expert),
        "bias gradients": ("add_biases", of_the_next_bias),
    }[name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.matrix)], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "RMSNorm",
        "rotation",
        "rotation of one row",
        "cross-entropy",
        "cross-entropy by its sum",
        "weight gradients",
        "SwiGLU",
        "SwiGLU of other factors",
        "SwiGLU without its limit",
        "row sums",
        "expert sums",
        "router products",
        "expert numbers",
        "expert gradients",
        "bias gradients",
    ],
)
def test_wrong_operations_are_refused_with_a_warning(monkeypatch, caplog, name, dtype) -> None:
    monkeypatch.setattr(self_check, *_wrong(name))
    monkeypatch.setattr(self_check, "has_grouped_products", lambda *_: True)
    with caplog.at_level(logging.WARNING, "distca.ops.self_check"):
        found = check_operations(WIDTHS, dtype, CPU)
    (operation,) = (each for each, objection in found.items() if objection)
    assert name.startswith(operation)
    assert not triton.is_trusted(operation) and len(triton._refused) == 1
    (line,) = caplog.messages
    assert line.startswith(f"The fused {operation} is refused, and torch's own runs, more slowly: ")
    assert "% off the reference in " in line


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_experts_products_are_checked_where_they_are_grouped(monkeypatch, dtype) -> None:
    monkeypatch.setattr(self_check, "_expert_gradients", lambda _: 1 / 0)
    grouped = dtype == torch.float32 and hasattr(torch.nn.functional, "grouped_mm")
    assert ("expert gradients" in check_operations(WIDTHS, dtype, CPU)) == grouped == (len(triton._refused) == 1)


def _wrong_on_one_rank() -> tuple[list[str], bool]:
    if dist.get_rank() == 1:
        setattr(self_check, *_wrong("SwiGLU"))
    found = check_operations(WIDTHS, torch.float32, CPU)
    return [str(each) for each in found.values() if each], triton.is_trusted("SwiGLU")


def test_ranks_refuse_together() -> None:
    first, second = run_ranks(2, _wrong_on_one_rank)
    assert first == second and first[1] is False
    assert first[0][0].startswith("on rank 1, the output is ")
