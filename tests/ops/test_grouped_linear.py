"""Products of many experts' weights at once, held against one product after the other in float64."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from distca.ops import grouped_linear as ops
from distca.ops.grouped_linear import Groups, add_biases, expert_row_sums, grouped_linear, is_grouped

ROWS = ([5, 0, 1, 18], [0, 0, 24, 0], [1, 0, 0, 0], [0, 0, 0, 0], [7, 3, 2, 12])


def drawn(rows, columns, outputs, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(rows), columns), *[(outputs, columns)] * len(rows), (sum(rows), outputs)]
    x, *weights, d_out = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    ends = torch.tensor(rows).cumsum(0).int()
    return x.requires_grad_(), [each.requires_grad_() for each in weights], d_out, Groups(rows, ends)


def one_after_the_other(x, weights, d_out, rows):
    """Output and gradients of rows and weights in float64."""
    x, *weights = (each.detach().double().requires_grad_() for each in (x, *weights))
    out = torch.cat([part @ weight.t() for part, weight in zip(x.split(rows), weights, strict=True)])
    out.backward(d_out.double())
    return [out, x.grad, *[torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]]


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-30))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "dtype, columns, outputs, most",
    [(torch.float32, 16, 24, 3e-7), (torch.float32, 15, 23, 3e-7), (torch.float64, 16, 24, 1e-15)],
)
def test_products_and_all_gradients(rows, dtype, columns, outputs, most):
    x, weights, d_out, groups = drawn(rows, columns, outputs, dtype)
    if hasattr(torch.nn.functional, "grouped_mm"):
        assert is_grouped(x, weights[0]) == (dtype == torch.float32 and columns == 16)
    out = grouped_linear(x, weights, groups)
    out.backward(d_out)
    found = [out, x.grad, *[weight.grad for weight in weights]]
    expected = one_after_the_other(x, weights, d_out, rows)
    assert [each.shape for each in found] == [each.shape for each in expected]
    assert all(each.dtype == dtype for each in found)
    assert max(map(error, found, expected)) <= most


@pytest.mark.parametrize("rows", ROWS)
def test_gradients_are_added_to_main_gradients(rows):
    x, weights, d_out, groups = drawn(rows, 16, 24, torch.float32)
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones(24, 16), False
    grouped_linear(x, weights, groups, into_main_grad=True).backward(d_out)
    expected = one_after_the_other(x, weights, d_out, rows)[2:]
    assert all(weight.grad.shape == weight.shape and weight.grad_added_to_main_grad for weight in weights)
    assert max(error(w.main_grad, 1 + each) for w, each in zip(weights, expected, strict=True)) <= 3e-7


@pytest.mark.parametrize("rows", ROWS)
def test_one_kernel_adds_all_gradients_that_lie_evenly(rows, monkeypatch):
    x, weights, d_out, groups = drawn(rows, 16, 24, torch.float32)
    memory = torch.ones(len(rows), 24 * 16 + 8)  # as beside another linear layer's
    for weight, place in zip(weights, memory, strict=True):
        weight.main_grad, weight.grad_added_to_main_grad = place[: 24 * 16].view(24, 16), False
    launches = []

    def kernel(sums_EOI, d_PO, x_PI, ends_E):
        launches.append(ends_E)
        for total, d, x_of in zip(sums_EOI, d_PO.split(rows), x_PI.split(rows), strict=True):
            total += d.t() @ x_of

    monkeypatch.setitem(sys.modules, "distca.ops.triton.expert_gradients", SimpleNamespace(add_expert_gradients=kernel))
    monkeypatch.setattr(ops, "_come_at_once", lambda weights, x: ops.lie_evenly([each.main_grad for each in weights]))
    grouped_linear(x, weights, groups, into_main_grad=True).backward(d_out)
    expected = one_after_the_other(x, weights, d_out, rows)
    assert len(launches) == 1 and error(x.grad, expected[1]) <= 3e-7
    assert all(weight.grad.shape == weight.shape and weight.grad_added_to_main_grad for weight in weights)
    assert max(error(w.main_grad, 1 + each) for w, each in zip(weights, expected[2:], strict=True)) <= 3e-7
    assert bool((memory[:, 24 * 16 :] == 1).all())


@pytest.mark.parametrize("again", [False, True])
def test_weights_of_two_halves_are_noted_once_in_a_backward_pass(again):
    """Also where each half is computed again, in a backward pass of its own inside the other."""
    x, weights, d_out, groups = drawn([3, 0, 2], 16, 24, torch.float32)
    came = []
    for number, weight in enumerate(weights):
        weight.main_grad = torch.zeros(24, 16)
        weight.register_post_accumulate_grad_hook(lambda _, number=number: came.append(number))

    def half(part):
        return grouped_linear(part, weights, groups, into_main_grad=True)

    for passes in (1, 2):
        parts = [checkpoint(half, part, use_reentrant=True) if again else half(part) for part in (x, 2 * x)]
        came.clear()
        with _Additions() as additions:
            torch.autograd.backward(parts, [d_out, d_out])
        assert sorted(came) == sorted(list(range(3)) * (2 if again else 1))
        assert again or (24, 16) not in additions.shapes
        expected = one_after_the_other(x, weights, d_out, [3, 0, 2])[2:]
        assert max(error(w.main_grad, 3 * passes * each) for w, each in zip(weights, expected, strict=True)) <= 3e-7
        for weight in weights:
            weight.grad = None


class _Additions(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_):
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_frozen_weights_and_inputs_get_no_gradient():
    x, weights, d_out, groups = drawn([3, 2], 16, 24, torch.float32)
    weights[0].requires_grad_(False)
    grouped_linear(x.detach(), weights, groups).backward(d_out)
    assert x.grad is None and weights[0].grad is None and weights[1].grad is not None


def test_hosts_are_asked_nothing(monkeypatch):
    """The grouped product takes its groups from the device."""
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped product")
    x, weights, d_out, groups = drawn([3, 2], 16, 24, torch.float32)
    seen = []
    product = torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        ops.torch.nn.functional, "grouped_mm", lambda *a, offs: seen.append(offs) or product(*a, offs=offs)
    )
    grouped_linear(x, weights, groups).backward(d_out)
    assert [offs is groups.ends_E for offs in seen] == [True, True]


@pytest.mark.parametrize("rows", [*ROWS, [4000, 1, 0, 700]])
@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_of_biases_are_rounded_once(rows, scaled):
    x, biases, d_out, groups = drawn(rows, 1, 24, torch.bfloat16)
    biases = [each.detach().flatten().requires_grad_() for each in biases]
    scale = torch.linspace(0.1, 1, len(x)) if scaled else None
    products = d_out.double() * (scale.double()[:, None] if scaled else 1)
    expected = [part.sum(0) for part in products.split(rows)]
    sums = expert_row_sums(d_out, groups, scale)
    assert sums.dtype == torch.float32 and max(map(error, sums, expected)) <= 1e-6
    add_biases(x.detach().expand(-1, 24), biases, groups, scale).backward(d_out)
    assert all(torch.equal(bias.grad, each.bfloat16()) for bias, each in zip(biases, sums, strict=True))


def test_one_kernel_sums_the_gradients_of_all_biases(monkeypatch):
    x, biases, d_out, groups = drawn([5, 0, 3], 1, 24, torch.float32)
    biases, scale = [each.detach().flatten().requires_grad_() for each in biases], torch.rand(8)
    biases[0].requires_grad_(False)
    launches = []

    def kernel(*given):
        launches.append(given)
        return torch.arange(3.0)[:, None].expand(3, 24)

    monkeypatch.setattr(ops, "has_kernels", lambda x, operation: operation == "bias gradients")
    monkeypatch.setitem(sys.modules, "distca.ops.triton.bias_gradients", SimpleNamespace(expert_row_sums=kernel))
    add_biases(x.detach().expand(-1, 24), biases, groups, scale).backward(d_out)
    ((rows, factors, ends),) = launches
    assert torch.equal(rows, d_out) and torch.equal(factors, scale) and ends is groups.ends_E
    assert biases[0].grad is None and [float(each.grad.mean()) for each in biases[1:]] == [1, 2]
