"""Activations that are freed until backward: they come back in time, and neither they nor their source stay longer."""

import weakref
from functools import partial

import pytest
import torch

from distca.ops.recomputed import forget_until_backward


def _square(x):
    """x² as an operation that keeps x, and does not need its output for backward."""
    return torch.ops.aten.mul(x, x)


def _fill(x, out):
    torch.mul(x, x, out=out)


def test_forgotten_tensor_comes_back_for_backward():
    x = torch.randn(5, 10, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad((_square(x) @ weight.t()).square().sum(), (x, weight))
    out = _square(x)
    used = out @ weight.t()
    forget_until_backward(out, partial(_fill, x.detach()), used)
    assert out.untyped_storage().nbytes() == 0
    got = torch.autograd.grad(used.square().sum(), (x, weight))
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def test_backward_frees_both_while_the_loss_is_still_there():
    weight = torch.randn(3, 10, requires_grad=True)
    x = torch.randn(5, 10, requires_grad=True) * 2
    out = _square(x)
    used = out @ weight.t()
    forget_until_backward(out, partial(_fill, x.detach()), used)
    loss = used.square().sum()
    memory = [weakref.ref(tensor.untyped_storage()) for tensor in (x, out)]
    del x, out, used
    assert all(storage() is not None for storage in memory)
    loss.backward()
    assert [storage() for storage in memory] == [None, None]


def test_nothing_is_forgotten_without_a_graph():
    with torch.no_grad():
        x = torch.randn(5, 10)
        out = _square(x)
        forget_until_backward(out, partial(_fill, x), out * 2)
    assert out.untyped_storage().nbytes()


class _Product(torch.autograd.Function):
    """x @ weightᵀ and no bias, as megatron's checkpointed MLP returns them, computed again in a nested backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t(), None

    @staticmethod
    def backward(ctx, d_out, _):
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            out = x @ weight.t()
        torch.autograd.backward(out, d_out)
        return x.grad, weight.grad


@pytest.mark.parametrize("source_needs_gradient", [True, False])
def test_it_is_back_before_a_function_of_several_outputs_recomputes(source_needs_gradient):
    weight = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    halves = torch.randn(2, 5, 10, dtype=torch.float64, requires_grad=source_needs_gradient)
    wanted = (weight, halves) if source_needs_gradient else (weight,)
    expected = torch.autograd.grad(sum((_square(x) @ weight.t()).square().sum() for x in halves), wanted)
    loss = 0.0
    for x in halves:
        out = _square(x)
        used = _Product.apply(out, weight)
        forget_until_backward(out, partial(_fill, x.detach()), used[0])
        assert out.untyped_storage().nbytes() == 0
        loss += used[0].square().sum()
        del out, used
    loss.backward()
    assert all(torch.allclose(tensor.grad, right) for tensor, right in zip(wanted, expected, strict=True))
