"""The fused SwiGLU, other activations, and the MLPs around them against megatron-core's own, and what they keep."""

import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from distca.testing.ranks import run_ranks
from distca.testing.reference_attention import relative_error

WIDTH = 10


def _reference(x, d_out):
    gate, up = x.chunk(2, dim=-1)
    out = torch.nn.functional.silu(gate) * up
    return out.detach(), torch.autograd.grad(out, x, d_out)[0]


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("dtype,limit", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2**-9)])
def test_values_and_gradient(rows, dtype, limit):
    from distca.ops.swiglu import swiglu

    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 1, 2 * WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    d_out = torch.randn(rows, 1, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    expected = _reference(x.double().requires_grad_(), d_out.double())
    out = swiglu(x.requires_grad_())
    assert out.dtype == dtype
    for ours, theirs in zip((out, torch.autograd.grad(out, x, d_out)[0]), expected, strict=True):
        assert ours.shape == theirs.shape
        assert not rows or relative_error(ours, theirs) < limit


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("dtype,limit", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_factors_of_rows(rows, dtype, limit):
    """In bfloat16 the product is rounded once more than without."""
    from distca.ops.swiglu import swiglu

    generator = torch.Generator().manual_seed(rows)
    wide = torch.promote_types(dtype, torch.float32)
    x, d_out = (torch.randn(rows, n, generator=generator, dtype=torch.float64).to(dtype) for n in (2 * WIDTH, WIDTH))
    factors = torch.rand(rows, generator=generator, dtype=torch.float64).to(wide)
    inputs = [x.requires_grad_(), factors.requires_grad_()]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    gate, up = exact[0].chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up * exact[1][:, None]
    out = swiglu(*inputs)
    found = (out, *torch.autograd.grad(out, inputs, d_out))
    for ours, theirs in zip(found, (expected, *torch.autograd.grad(expected, exact, d_out.double())), strict=True):
        assert ours.shape == theirs.shape
        assert not rows or relative_error(ours, theirs.detach()) < limit
    assert found[1].dtype == dtype and found[2].dtype == wide


def _formula(x, factors, gate):
    """By torch's own operations, and their gradients."""
    g, u = x.chunk(2, dim=-1)
    if gate.limit:
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
    return g * torch.sigmoid(gate.slope * g) * (u + gate.offset) * factors[:, None]


@pytest.mark.parametrize("slope,offset,limit", [(1.702, 1.0, 0.5), (1.0, 0.0, 1.25), (1.702, 0.0, 0.0)])
def test_gates_with_limits_slopes_and_offsets(slope, offset, limit):
    """Numbers at a limit count as within it."""
    from distca.ops.gate import Gate
    from distca.ops.swiglu import swiglu

    gate, generator = Gate(slope, offset, limit), torch.Generator().manual_seed(5)
    x, d_out, factors = (torch.randn(17, *n, generator=generator).double() for n in ([2 * WIDTH], [WIDTH], []))
    x[0], x[1] = limit, -limit
    inputs = [x.requires_grad_(), factors.requires_grad_()]
    expected = _formula(*inputs, gate)
    found = swiglu(*inputs, gate)
    exact = (expected, *torch.autograd.grad(expected, inputs, d_out))
    for ours, theirs in zip((found, *torch.autograd.grad(found, inputs, d_out)), exact, strict=True):
        assert relative_error(ours, theirs.detach()) < 1e-14
    x.grad = None
    with torch.no_grad():
        x[3, 2] = float("nan")
    assert swiglu(x, factors, gate)[3].isnan().tolist() == [column == 2 for column in range(WIDTH)]


@pytest.mark.parametrize("name", ["sigmoid_gelu", "quick_gelu", "silu", "gelu"])
def test_experts_keep_their_products_and_what_is_put_out(name):
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    from megatron_patches.experts.grouped import _activated
    from megatron_patches.model.expert_fields import sigmoid_gelu

    functions = {"sigmoid_gelu": sigmoid_gelu, "quick_gelu": quick_gelu}
    function = functions.get(name) or getattr(torch.nn.functional, name)
    fields = {"gated_linear_unit": True, "activation_func_fp8_input_store": False, "activation_func": function}
    fields["bias_activation_fusion"] = False
    config = SimpleNamespace(**fields, activation_func_clamp_value=0.5, glu_linear_offset=1.0)
    generator = torch.Generator().manual_seed(6)
    x, probs = (torch.randn(9, *n, generator=generator).double().requires_grad_() for n in ([2 * WIDTH], []))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y) or y, lambda y: y):
        out = _activated(config, x, probs)
    gate, up = x.chunk(2, dim=-1)
    expected = function(gate.clamp(max=0.5)) * (up.clamp(-0.5, 0.5) + 1) * probs[:, None]
    d_out = torch.randn_like(out)
    for ours, theirs in zip(
        (out, *torch.autograd.grad(out, (x, probs), d_out)),
        (expected, *torch.autograd.grad(expected, (x, probs), d_out)),
        strict=True,
    ):
        assert relative_error(ours, theirs.detach()) < 1e-14
    if name != "gelu":
        assert [y.data_ptr() for y in kept] == [x.data_ptr(), probs.data_ptr()]


def _mlps(tp):
    """(name of ours, output and gradients of megatron's MLP, and of ours with the same weights) in float64, for some
    activations."""
    warnings.filterwarnings("ignore")
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    from megatron.core.activations import squared_relu
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    from distca.parity.cases import ParityShape
    from megatron_patches.model.gpt import transformer_config
    from megatron_patches.patches.fused_ops import fuse_swiglu
    from megatron_patches.ranks.groups import initialize_model_parallel

    initialize_model_parallel(tp, 1, 1)
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    geglu = {"activation_func": partial(torch.nn.functional.gelu, approximate="tanh")}
    changes = (
        {},
        {**geglu, "bias_activation_fusion": False},
        {**geglu, "bias_activation_fusion": False, "glu_linear_offset": 0.7, "activation_func_clamp_value": 0.5},
        {"activation_func": squared_relu, "bias_activation_fusion": False, "gated_linear_unit": False},
    )
    plain = transformer_config(ParityShape(), torch.float64, cpu_initialization=True)
    return [_both(replace(plain, **fields), submodules, MLP, fuse_swiglu) for fields in changes]


def _both(config, submodules, MLP, fuse_swiglu):
    results = []
    for fused in (False, True):
        torch.manual_seed(2)
        mlp = MLP(config, submodules, ffn_hidden_size=config.ffn_hidden_size)
        if fused:
            fuse_swiglu(mlp)
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(11, 1, config.hidden_size, generator=generator, dtype=torch.float64, requires_grad=True)
        out, bias = mlp(x)
        assert bias is None
        out.square().sum().backward()
        results.append((out.detach(), x.grad, *(weight.grad for weight in mlp.parameters())))
    return type(mlp).__name__, *results


@pytest.mark.parametrize("tp", [1, 2])
def test_mlp_is_megatrons(tp):
    for found in run_ranks(tp, _mlps, tp):
        assert [name for name, _, _ in found] == ["SwigluMLP", "LeanMLP", "LeanMLP", "LeanMLP"]
        for _, stock, ours in found:
            assert len(ours) == len(stock) == 4
            for mine, theirs in zip(ours, stock, strict=True):
                assert relative_error(mine, theirs) < 1e-14


def test_a_recomputed_function_keeps_its_input_alone():
    from distca.ops.recomputed import recomputed

    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y) or y, lambda y: y):
        out = recomputed(lambda y: torch.sin(y) * torch.exp(y), x)
    assert [y.data_ptr() for y in kept] == [x.data_ptr()]
    d_out = torch.randn_like(x)
    expected = d_out * (torch.cos(x) + torch.sin(x)) * torch.exp(x)
    assert relative_error(torch.autograd.grad(out, x, d_out)[0], expected.detach()) < 1e-14
