"""RMSNorm against its formula in float64, with an epsilon that shows, and the mark that megatron reduces by."""

from types import SimpleNamespace

import pytest
import torch

from distca.testing.reference_attention import relative_error


def _config(dtype, sequence_parallel, zero_centered=False):
    return SimpleNamespace(
        params_dtype=dtype, sequence_parallel=sequence_parallel, layernorm_zero_centered_gamma=zero_centered
    )


@pytest.mark.parametrize("rows", [0, 1, 37])
def test_values_gradients_and_refilling(rows: int) -> None:
    from megatron_patches.patches.norms import RMSNorm

    torch.manual_seed(rows)
    norm = RMSNorm(_config(torch.float64, True), 12, eps=0.3)
    x, d_out = torch.randn(rows, 1, 12, dtype=torch.float64, requires_grad=True), torch.randn(rows, 1, 12).double()
    weight = torch.randn(12, dtype=torch.float64, requires_grad=True)
    norm.weight.data.copy_(weight)
    expected = x / (x.square().mean(-1, keepdim=True) + 0.3).sqrt() * weight
    out = norm(x)
    ours_all = (out, *torch.autograd.grad(out, (x, norm.weight), d_out))
    theirs_all = (expected, *torch.autograd.grad(expected, (x, weight), d_out))
    for ours, theirs in zip(ours_all, theirs_all, strict=True):
        assert ours.shape == theirs.shape
        assert not rows or relative_error(ours.detach(), theirs.detach()) < 1e-14
    again = torch.full_like(out, torch.nan)
    with torch.no_grad():
        norm.fill(x.detach(), again)
    assert torch.equal(again, out)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_weight_says_whether_its_gradient_is_added_up(sequence_parallel: bool) -> None:
    from megatron_patches.patches.norms import RMSNorm

    norm = RMSNorm(_config(torch.bfloat16, sequence_parallel), 4)
    assert norm.weight.sequence_parallel is sequence_parallel and norm.weight.dtype == torch.bfloat16
