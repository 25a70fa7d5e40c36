"""The norm and clipping of all gradients at once, held against Megatron's own functions."""

from unittest import mock

import pytest
import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as optimizers

from megatron_patches.patches.gradient_norm import _scale_by_tensor, norm_gradients_together

SHAPES = ((3, 5), (0,), (1,), (700,), ())


@pytest.fixture(autouse=True)
def _own(monkeypatch):
    monkeypatch.setattr(clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", utils.local_multi_tensor_scale)
    if hasattr(clip_grads, "multi_tensor_scale_tensor_impl"):
        monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", None)
    monkeypatch.setattr(optimizers, "get_grad_norm_fp32", clip_grads.get_grad_norm_fp32)
    norm_gradients_together()
    assert clip_grads.l2_norm_impl is not utils.local_multi_tensor_l2_norm


def _gradients(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_is_that_of_all_numbers(dtype):
    gradients = _gradients(dtype)
    exact = torch.cat([each.double().flatten() for each in gradients]).norm()
    norm, _ = clip_grads.l2_norm_impl(1 << 16, torch.zeros(1), [gradients], False)
    assert norm.shape == () and norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize("in_place", [True, False])
def test_gradients_are_scaled_as_before(in_place):
    given, expected = _gradients(), [each * 0.3 for each in _gradients()]
    into = given if in_place else [torch.full_like(each, torch.nan) for each in given]
    clip_grads.multi_tensor_scale_impl(1 << 16, torch.zeros(1), [given, into], 0.3)
    assert all(torch.equal(a, b) for a, b in zip(into, expected, strict=True))
    clip_grads.multi_tensor_scale_impl(1 << 16, torch.zeros(1), [[], []], 0.3)  # on a rank without gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_scaled_by_a_tensor(dtype):
    given, factor = _gradients(dtype), torch.tensor([0.3003])
    expected = [(each.float() * 0.3003).to(dtype) for each in given]
    _scale_by_tensor(1 << 16, torch.zeros(1), [given, given], factor)
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


def test_what_transformer_engine_brings_stays(monkeypatch):
    monkeypatch.setattr(clip_grads, "l2_norm_impl", len)
    norm_gradients_together()
    assert clip_grads.l2_norm_impl is len


@pytest.mark.skipif(not hasattr(clip_grads, "multi_tensor_scale_tensor_impl"), reason="Megatron-Core is older.")
@pytest.mark.parametrize("most", [0.5, 1e3])
def test_gradients_are_clipped_without_reading_the_norm(most):
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for weight, gradient in zip(weights, _gradients(), strict=True):
        weight.grad = gradient
    exact = torch.cat([each.double().flatten() for each in _gradients()])
    on_cpu, names = torch.zeros, torch.Tensor.type
    with (
        mock.patch.object(torch, "zeros", lambda *size, device=None, **named: on_cpu(*size, **named)),
        mock.patch.object(torch.Tensor, "type", lambda x: f"torch.cuda.{names(x).rpartition('.')[2]}"),
        mock.patch.object(torch.distributed, "all_reduce"),
        mock.patch.object(torch.Tensor, "item", side_effect=AssertionError),
        mock.patch.object(torch.Tensor, "__bool__", side_effect=AssertionError),
    ):
        norm = clip_grads.get_grad_norm_fp32([weight.grad for weight in weights])
        clip_grads.clip_grad_by_total_norm_fp32(weights, most, norm)
        clip_grads.clip_grad_by_total_norm_fp32([], most, norm)  # on a rank without weights of a kind
    assert float(norm) == pytest.approx(float(exact.norm()), rel=1e-6)
    assert f"{norm:.3f}" == f"{float(norm):.3f}"  # as scripts may print what optimizer.step() returns
    clipped = torch.cat([weight.grad.flatten() for weight in weights])
    assert torch.allclose(clipped.double(), exact * min(1, most / (float(exact.norm()) + 1e-6)), rtol=1e-6, atol=0)
    assert most < 1 or torch.equal(clipped, torch.cat([each.flatten() for each in _gradients()]))


def test_a_rank_without_gradients_can_print_the_norm_too():
    on_cpu = torch.zeros
    with (
        mock.patch.object(torch, "zeros", lambda *size, device=None, **named: on_cpu(*size, **named)),
        mock.patch.object(torch.distributed, "all_reduce", lambda norm, **_: norm.fill_(4)),
    ):
        norm = optimizers.get_grad_norm_fp32([])
    assert f"{norm:.3f}" == "2.000"
