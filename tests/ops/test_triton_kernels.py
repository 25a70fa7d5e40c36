"""Triton's kernels against float64, run by its interpreter on a CPU, in a process of their own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch

from distca.testing.reference_attention import relative_error

if find_spec("triton") is None:
    pytest.skip("Triton is not installed.", allow_module_level=True)

CASES = {
    "add_rms_norm": [(5, 96), (70, 48)],
    "bias_gradients": [(1, 16), (300, 136)],
    "chunk_gradients": [(16, 32), (64, 16)],
    "core_rows": [(2, 12), (0, 8), (1, 16)],
    "expert_gradients": [(8, 16), (136, 264)],
    "expert_numbers": [(0, 8), (1, 3), (150, 44)],
    "expert_sums": [(5, 96), (3, 2100)],
    "narrow_norm": [(0, 16), (1, 128), (131, 96), (45, 512), (9, 520)],
    "normed_rotation": [(0, 8), (1, 16), (3, 24), (34, 8)],
    "row_dots": [(1, 64), (333, 96)],
    "swiglu": [(3, 96), (2, 5000)],
}
GATES = {"SwiGLU": (1.0, 0.0, 0.0), "gpt-oss's": (1.702, 1.0, 0.7)}
"""Slope, offset and limit, the latter between the numbers that are drawn."""


def _draws(rows, columns, dtype):
    generator = torch.Generator().manual_seed(rows)
    wide = [torch.randn(rows, columns, generator=generator, dtype=torch.float64) for _ in range(5)]
    weight = 1 + 0.1 * torch.randn(columns, generator=generator, dtype=torch.float64)
    return [each.to(dtype) for each in (*wide, weight)]


def _add_rms_norm(function, rows, columns, dtype, held):
    """Sums, norms and gradients of two layers of a residual stream."""
    x, branch, *upstream, weight = (each.to(held) for each in _draws(rows, columns, dtype))
    inputs = [each.requires_grad_() for each in (x, branch, weight)]
    total, normed = function(x, branch, weight, 1e-5)
    same, again = function(total, None, weight, 1e-5)
    gradients = torch.autograd.grad((same, normed, again), inputs, upstream)
    return [each.detach() for each in (total, normed, same, again, *gradients)]


def _check_add_rms_norm(rows, columns, dtype):
    from distca.ops import rms_norm as plain
    from distca.ops.triton import rms_norm as kernels

    exact = _add_rms_norm(plain.add_rms_norm, rows, columns, dtype, torch.float64)
    ours = _add_rms_norm(kernels.add_rms_norm, rows, columns, dtype, dtype)
    stock = _add_rms_norm(plain.add_rms_norm, rows, columns, dtype, dtype)
    for mine, theirs, expected in zip(ours, stock, exact, strict=True):
        assert mine.dtype == dtype and mine.shape == expected.shape
        assert relative_error(mine, expected) <= 1.05 * relative_error(theirs, expected) + 1e-7


def _check_narrow_norm(rows, columns, dtype):
    """Rows of several programs in forward; in backward programs have several steps, and not all equally many."""
    from distca.ops import rms_norm as plain
    from distca.ops.triton import narrow_norm
    from distca.ops.triton import rms_norm as kernels

    narrow_norm._MOST_PROGRAMS = 2
    x, upstream, *_, weight = _draws(rows, columns, dtype)
    found = []
    for norm, held in ((kernels, dtype), (plain, dtype), (plain, torch.float64)):
        inputs = [each.to(held).requires_grad_() for each in (x, weight)]
        out = norm.rms_norm(*inputs, 1e-5)
        found.append([out.detach(), *torch.autograd.grad(out, inputs, upstream.to(held))])
    for mine, theirs, expected in zip(*found, strict=True):
        assert mine.dtype == dtype and mine.shape == expected.shape
        if expected.numel() and rows:
            assert relative_error(mine, expected) <= 1.05 * relative_error(theirs, expected) + 1e-7


def _check_chunk_gradients(keys, values, dtype):
    """Chunks of 16 rows of pieces of 37, 1 and 16, of which the last of the first has 5."""
    from distca.ops.triton.chunk_gradients import chunk_gradients
    from distca.recurrent import chunk_gradients as plain

    generator, rows, heads, chunks = torch.Generator().manual_seed(keys), 54, 2, 5

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    q, k, w = (draw(1, rows, heads, keys) for _ in range(3))
    u, do, du = (draw(1, rows, heads, values) for _ in range(3))
    h, dh = (draw(1, chunks, heads, keys, values) for _ in range(2))
    g = -torch.rand(1, rows, heads, generator=generator)
    of_pieces = torch.tensor([0, 37, 38, 54]), torch.tensor([[0, 0], [0, 1], [0, 2], [1, 0], [2, 0]])
    ours = chunk_gradients(q, k, u, do, h, dh, g, du, 0.3, *of_pieces, 16)

    def stock(held):
        given = [each.to(held) for each in (q, k, u, do, h, dh, w, g, du)]
        given[7] = g.to(torch.promote_types(held, g.dtype))
        return plain.chunk_gradients(*given, 0.3, *of_pieces, 16)

    for mine, theirs, exact in zip(ours, stock(dtype), stock(torch.float64), strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == exact.shape
        assert relative_error(mine, exact) <= 2 * relative_error(theirs, exact) + 2e-7


def _check_core_rows(number, dim, dtype):
    """With and without pieces, which are of one row, shorter than the convolution, or longer than a program's rows."""
    from itertools import accumulate, pairwise

    from distca.plan.recurrence import Recurrence
    from distca.recurrent import convolution as plain

    what = [Recurrence.gated_delta_net(2, 4, dim, 24), Recurrence.mamba2(1, 2, dim, 16)][number % 2]
    lengths, continues = [
        ((1, 2, 50, 3, 1, 20), [True, False, True, True, False, False]),
        ((), []),
        ((1, 1), [True] * 2),
    ][number]
    ends, generator = list(accumulate((0, *lengths))), torch.Generator().manual_seed(number)
    picked = torch.randint(0, 6, (sum(continues), what.halo_rows), generator=generator)
    pieces = plain.PieceRows(list(pairwise(ends)), continues, picked)
    sizes = (ends[-1] + 3, what.channels), (5, what.channels), (what.channels, what.kernel), (what.channels,)
    drawn = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    upstream = [
        torch.randn(len(drawn[0]), what.heads, each, generator=generator).to(dtype)
        for each in (what.key_dim, what.key_dim, what.value_dim)
    ]

    def found(compute, held):
        leaves = [each.to(held).requires_grad_() for each in drawn]
        mixed, halo, *weights = leaves
        out = compute(mixed, halo, plain.CoreParameters(*weights))
        gradients = torch.autograd.grad(out, leaves, [each.to(held) for each in upstream], materialize_grads=True)
        return [*(each.detach() for each in out), *gradients]

    def by_torch(mixed, halo, weights):
        rows = plain.core_rows(mixed, mixed[:, :1], mixed[:, :1], halo, weights, pieces, what)
        return [rows.q, rows.k, rows.v]

    def fused(mixed, halo, weights):
        return plain.fused_rows(mixed, halo, weights, pieces, what)

    for mine, theirs, exact in zip(
        found(fused, dtype), found(by_torch, dtype), found(by_torch, torch.float64), strict=True
    ):
        assert mine.dtype == theirs.dtype and mine.shape == exact.shape
        assert relative_error(mine, exact) <= 2 * relative_error(theirs, exact) + 2e-7


def _check_expert_numbers(rows, experts, _):
    """Against sorted indices; a program has 64 rows of 44 experts."""
    from distca.ops import expert_numbers as plain
    from distca.ops.triton.expert_numbers import expert_numbers

    for topk in (1, 3):
        scores = torch.rand(rows, experts, generator=torch.Generator().manual_seed(rows))
        indices = scores.topk(topk).indices
        chosen = torch.zeros(rows, experts, dtype=torch.bool).scatter(1, indices, True)
        numbers = expert_numbers(chosen, topk)
        assert numbers.dtype == torch.int32 and torch.equal(numbers, indices.sort(1).values.int())
        assert torch.equal(plain.expert_numbers(chosen, topk), numbers)


def _check_expert_sums(rows, columns, dtype):
    """Some pairs are other ranks', and a row may have none."""
    from distca.ops.row_sums import expert_sums as plain
    from distca.ops.triton.row_sums import expert_sums

    x, *_ = _draws(4 * rows, columns, dtype)
    pairs = torch.randperm(8 * rows, generator=torch.Generator().manual_seed(rows))[: 4 * rows].view(rows, 4)
    pairs[0] = 4 * rows
    sums = torch.empty(rows, columns, dtype=dtype)
    expert_sums(x, pairs, sums)
    beside = torch.cat((x.double(), x.new_zeros(4 * rows, columns)))
    exact, stock = beside[pairs].sum(1), plain(x, pairs)
    assert relative_error(plain(x.double(), pairs), exact) <= 1e-15
    assert relative_error(sums, exact) <= 1.05 * relative_error(stock, exact) + 1e-7


def _check_normed_rotation(rows, dim, dtype):
    """With several queries for a key and with one, and with more groups than a program's."""
    from distca.ops import rotary as plain
    from distca.ops.triton import rotary as kernels

    generator = torch.Generator().manual_seed(rows)
    heads, groups = [(6, 2), (3, 3)][rows % 2]
    shapes = (rows, (heads + 2 * groups) * dim), (dim,), (dim,), (rows, heads, dim), (rows, 2, groups, dim)
    mixed, query, key, *upstream = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    angles = 1e3 * torch.rand(rows, dim // 2, generator=generator)
    rotation = plain.Rotation(angles.cos(), angles.sin())

    def found(compute, held):
        leaves = [each.to(held).requires_grad_() for each in (mixed, query, key)]
        out = compute(leaves[0], plain.HeadNorms(*leaves[1:], 1e-3))
        gradients = torch.autograd.grad(out, leaves, [each.to(held) for each in upstream])
        return [*(each.detach() for each in out), *gradients]

    def fused(mixed, norms):
        return kernels.split_and_rotate(mixed, rotation.cos_NE, rotation.sin_NE, groups, norms)

    def by_torch(mixed, norms):
        return plain.split_and_rotate(mixed, rotation, groups, norms)

    for mine, theirs, exact in zip(
        found(fused, dtype), found(by_torch, dtype), found(by_torch, torch.float64), strict=True
    ):
        assert mine.dtype == theirs.dtype and mine.shape == exact.shape
        assert relative_error(mine, exact) <= 1.05 * relative_error(theirs, exact) + 2e-7


def _check_row_dots(rows, columns, dtype):
    from distca.ops.triton.row_sums import row_dots

    a, b, *_ = _draws(rows, columns, dtype)
    sums = torch.empty(rows)
    row_dots(a, b, sums)
    exact, stock = (a.double() * b.double()).sum(-1), (a.float() * b.float()).sum(-1)
    assert relative_error(sums, exact) <= 2 * relative_error(stock, exact) + 1e-7


def _check_expert_gradients(outputs, inputs, dtype):
    """Experts with many rows, none, and one; a weight's place in memory is followed by another weight's."""
    from distca.ops.triton.expert_gradients import add_expert_gradients

    rows = [70, 0, 1, 9]
    generator = torch.Generator().manual_seed(outputs)
    x, d_out = (torch.randn(sum(rows), each, generator=generator).to(dtype) for each in (inputs, outputs))
    memory = torch.randn(len(rows), outputs * inputs + 40, generator=generator)
    sums, before = memory[:, : outputs * inputs].view(len(rows), outputs, inputs), memory.clone()
    add_expert_gradients(sums, d_out, x, torch.tensor(rows).cumsum(0).int())
    assert torch.equal(memory[:, outputs * inputs :], before[:, outputs * inputs :])
    assert torch.equal(memory[1], before[1])
    parts = zip(before, sums, d_out.split(rows), x.split(rows), strict=True)
    for expert, (old, new, d, rows_of) in enumerate(parts):
        exact = old[: outputs * inputs].view(outputs, inputs).double() + d.double().t() @ rows_of.double()
        assert relative_error(new, exact) <= 3e-7, expert


def _check_bias_gradients(most, columns, dtype):
    """Experts with many rows, none, and one."""
    from distca.ops.triton.bias_gradients import expert_row_sums

    rows = [most, 0, 1, 9]
    x, *_ = _draws(sum(rows), columns, dtype)
    factors = torch.linspace(0, 1, len(x))
    for scale in (None, factors):
        sums = expert_row_sums(x, scale, torch.tensor(rows).cumsum(0).int())
        scaled = x.double() * (1 if scale is None else scale.double()[:, None])
        exact = torch.stack([part.sum(0) for part in scaled.split(rows)])
        assert sums.dtype == torch.float32 and relative_error(sums, exact) <= 3e-7
        assert not sums[1].any()


def _check_swiglu(rows, columns, dtype):
    for gate in GATES.values():
        for scaled in (False, True):
            _check_gate(rows, columns, dtype, gate, scaled)
    _check_strided_gate(rows, columns, dtype)


def _check_strided_gate(rows, columns, dtype):
    """Rows, factors and gradients that are not contiguous."""
    from distca.ops import swiglu as plain

    drawn = [torch.randn(2, rows, *more).to(dtype).transpose(0, 1) for more in ([2 * columns], [], [columns])]

    def found(held, kernels):
        x, factors, d_out = (each.to(held) for each in drawn)
        with patch.object(plain, "has_kernels", return_value=kernels):
            out = plain.swiglu(x.requires_grad_(), factors.requires_grad_())
            return [out.detach(), *torch.autograd.grad(out, (x, factors), d_out)]

    for mine, theirs, exact in zip(found(dtype, True), found(dtype, False), found(torch.float64, False), strict=True):
        assert relative_error(mine, exact) <= 2 * relative_error(theirs, exact) + 1e-7


def _check_gate(rows, columns, dtype, gate, scaled):
    """With factors of rows and without, in more blocks than one for 5,000 columns."""
    from distca.ops import swiglu as plain
    from distca.ops.triton import swiglu as kernels

    of, (first, second, d_out, factors, *_) = plain.Gate(*gate), _draws(rows, columns, dtype)
    x, given = torch.cat((first, second), -1), [factors[:, 0].float().contiguous()] * scaled
    ours = [torch.empty_like(each) for each in (d_out, x, *given)]
    kernels.swiglu(x, ours[0], given[0] if scaled else None, of)
    (kernels.scaled_swiglu_backward if scaled else kernels.swiglu_backward)(d_out, x, *given, *ours[1:], of)

    def stock(held):
        inputs = [each.to(torch.promote_types(each.dtype, held)).requires_grad_() for each in (x, *given)]
        out = plain.swiglu(*inputs, gate=of)
        return [out.detach(), *torch.autograd.grad(out, inputs, d_out.to(out.dtype))]

    for mine, theirs, expected in zip(ours, stock(dtype), stock(torch.float64), strict=True):
        assert mine.dtype == theirs.dtype
        assert relative_error(mine, expected) <= 2 * relative_error(theirs, expected) + 1e-7


@pytest.mark.parametrize("part", ["float16", pytest.param("float32", marks=pytest.mark.matrix)])
def test_kernels_are_no_farther_from_float64_than_torchs_operations(part):
    """In float16, where each kernel's first case is computed in float32 too, or in float32 alone."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-m", __name__, part], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.matrix
def test_expert_gradients_are_products_of_rows_that_hopper_reads_16_bytes_at_a_time():
    """Compiles the kernel as for widths of which nothing is known but that they are multiples of 8."""
    compiler = pytest.importorskip("triton.compiler")
    from triton.backends.compiler import GPUTarget

    from distca.ops.triton import expert_gradients as kernel

    types = {"sums": "*fp32", "d_of": "*bf16", "x_of": "*bf16", "ends": "*i32"}
    constants = {"WIDTH": kernel._WIDTH, "O_BLOCK": kernel._OUTPUTS, "I_BLOCK": kernel._INPUTS, "R_BLOCK": kernel._ROWS}
    names = kernel._add_gradients.arg_names
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in names}
    assert all(kernel._add_gradients.params[names.index(name)].do_not_specialize for name in ("outputs", "inputs"))
    source = compiler.ASTSource(
        kernel._add_gradients,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in types},
    )
    options = {"num_warps": 8, "num_stages": 3}
    found = compiler.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16" in found
    assert "cp.async.cg.shared.global" in found and "ld.global.b16" not in found


if __name__ == "__main__":
    for name, cases in CASES.items():
        for number, case in enumerate(cases):
            for dtype in (torch.float32, torch.float16):  # bfloat16 is cut off by the interpreter, not rounded
                if str(dtype) == f"torch.{sys.argv[1]}" or number == 0:
                    globals()[f"_check_{name}"](*case, dtype)
