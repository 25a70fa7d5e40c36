"""Norms against their formulas in float64, with an epsilon that shows, and the mark that megatron reduces by."""

from types import SimpleNamespace

import pytest
import torch

from distca.testing.reference_attention import relative_error


def _config(dtype, sequence_parallel, zero_centered=False):
    return SimpleNamespace(
        params_dtype=dtype, sequence_parallel=sequence_parallel, layernorm_zero_centered_gamma=zero_centered
    )


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "LayerNormWithoutBias"])
def test_values_gradients_and_refilling(name: str, zero_centered: bool, rows: int) -> None:
    from megatron_patches.patches import norms

    torch.manual_seed(rows)
    norm = getattr(norms, name)(_config(torch.float64, True, zero_centered), 12, eps=0.3)
    assert norm.weight.eq(0.0 if zero_centered else 1.0).all()
    x, d_out = torch.randn(rows, 1, 12, dtype=torch.float64, requires_grad=True), torch.randn(rows, 1, 12).double()
    drawn = [torch.randn(12, dtype=torch.float64, requires_grad=True) for _ in norm.parameters()]
    for parameter, values in zip(norm.parameters(), drawn, strict=True):
        parameter.data.copy_(values)
    centred = x if name == "RMSNorm" else x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 0.3).sqrt() * (drawn[0] + zero_centered)
    expected = expected + (drawn[1] if len(drawn) == 2 else 0)
    assert len(drawn) == (2 if name == "LayerNorm" else 1)
    out = norm(x)
    ours_all = (out, *torch.autograd.grad(out, (x, *norm.parameters()), d_out))
    theirs_all = (expected, *torch.autograd.grad(expected, (x, *drawn), d_out))
    for ours, theirs in zip(ours_all, theirs_all, strict=True):
        assert ours.shape == theirs.shape
        assert not rows or relative_error(ours.detach(), theirs.detach()) < 1e-14
    again = torch.full_like(out, torch.nan)
    with torch.no_grad():
        norm.fill(x.detach(), again)
    assert torch.equal(again, out)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_small_weights_that_are_zero_centred_are_not_rounded_to_factors(name: str) -> None:
    from megatron_patches.patches import norms

    norm = getattr(norms, name)(_config(torch.bfloat16, False, True), 64)
    torch.nn.init.constant_(norm.weight, 2.0**-9)  # one more is one, in bfloat16
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain = getattr(norms, name)(_config(torch.float32, False), 64)
    torch.nn.init.constant_(plain.weight, 1 + 2.0**-9)
    assert torch.equal(norm(x), plain(x.float()).bfloat16())


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "QueryWidthNorm"])
def test_parameters_say_whether_their_gradients_are_added_up(name: str, sequence_parallel: bool) -> None:
    from megatron_patches.patches import norms

    config = _config(torch.bfloat16, sequence_parallel)
    config.num_attention_heads = 3
    norm = getattr(norms, name)(config, 4)
    for parameter in norm.parameters():
        assert parameter.sequence_parallel is sequence_parallel and parameter.dtype == torch.bfloat16
