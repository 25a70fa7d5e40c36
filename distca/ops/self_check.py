"""The check of fused operations on this machine, against their plain torch versions in float64, forward and backward.

``CAD`` calls :func:`check_operations` before a model is built. If an operation's error is larger than rounding
explains, its plain version runs instead, on all ranks, with a warning.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from distca.cluster.agreement import first_objection
from distca.ops.cross_entropy import logits_to_gradient_, row_statistics
from distca.ops.expert_numbers import expert_numbers
from distca.ops.gate import SWIGLU, Gate
from distca.ops.grouped_linear import Groups, add_biases, grouped_linear, has_grouped_products
from distca.ops.output_loss import add_product
from distca.ops.rms_norm import add_rms_norm, rms_norm
from distca.ops.rotary import HeadNorms, Rotation, split_and_rotate
from distca.ops.router_linear import router_linear
from distca.ops.row_sums import expert_sums, row_dots
from distca.ops.swiglu import swiglu
from distca.ops.triton import Operation, refuse

logger = logging.getLogger(__name__)

_ROWS, _COLUMNS = 112, 10_016
"""Rows of operands, and columns of logits. Both are larger than a kernel's block. They are multiples of 16, because
Triton compiles a version of a kernel for these, which training runs."""
_WHOLE, _ROW = 1.0, 4.0
"""The largest error, relative to the norm, of a tensor as a whole and of one of its rows. The unit is the dtype's
spacing of numbers at 1. An operation beyond it is refused. One that computes in float32 and rounds once has an error of
0.25."""
_SUM = 256.0
"""A further error that is allowed, in the spacing of float32 at 1, for the rounding of long sums in float32."""


@dataclass(frozen=True)
class Widths:
    """Sizes of a rank's operands.

    Attributes:
        hidden: columns of a norm.
        ffn: columns of an MLP's activation.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: elements per head.
        latent: columns of each further norm, as latent attention (MLA) has them.
        gate: the gate of experts.
        experts: whether the model has experts.
        expert_biases: whether these have biases.
        head_norms: whether each head of queries and keys has a norm.
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    latent: tuple[int, ...] = ()
    gate: Gate = SWIGLU
    experts: bool = False
    expert_biases: bool = False
    head_norms: bool = False


@dataclass(frozen=True)
class Draw:
    """Draws random numbers that are the same in the run of the operation and in the run in float64.

    Attributes:
        generator: the source, on the CPU.
        device: device of the tensors.
        dtype: the dtype to which numbers are rounded.
        held: the dtype of the tensors: ``dtype``, or float64 in the run for comparison.
    """

    generator: torch.Generator
    device: torch.device
    dtype: torch.dtype
    held: torch.dtype

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype).to(self.device, self.held)

    def wide(self, *shape: int) -> torch.Tensor:
        """Numbers between 0 and 1, for operands that are float32 in training."""
        values = torch.rand(*shape, generator=self.generator).to(self.device)
        return values.to(torch.promote_types(self.held, torch.float32))


Outputs = dict[str, torch.Tensor]
"""Outputs and gradients of an operation by name, for messages."""


def check_operations(widths: Widths, dtype: torch.dtype, device: torch.device) -> dict[Operation, str | None]:
    """Checks the fused operations of a model with attention, and refuses those that are wrong on any rank.

    Plain versions of refused ones run. Operations of recurrent layers are checked in ``distca/recurrent/select.py``.

    All ranks call it at the same time, since they exchange the results.

    Args:
        widths: sizes of this rank's operands.
        dtype: dtype of parameters and activations.
        device: their device.

    Returns:
        By operation the reason why it is refused, the same on every rank; None for a right one. It has no operation
        that would never run on this rank.
    """
    found: dict[Operation, str | None] = {}
    for operation, run in _operations(widths).items():
        # Ranks with other GPUs may run what this one never does, and all ranks have to agree.
        runs = operation != "expert gradients" or has_grouped_products(dtype, device)
        objection = first_objection(why_wrong(run, dtype, device) if runs else None)
        if runs:
            found[operation] = objection
        if objection is not None:
            refuse(operation)
            logger.warning("The fused %s is refused, and torch's own runs, more slowly: %s.", operation, objection)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def why_wrong(run: Callable[[Draw], Outputs], dtype: torch.dtype, device: torch.device, seed: int = 0) -> str | None:
    """Returns the reason why an operation cannot be trusted, as a part of a sentence; None if it is right.

    Args:
        run: computes outputs and gradients by name, from the inputs that it draws.
        dtype: dtype of operands.
        device: their device.
        seed: seed of the random inputs.
    """
    try:
        actual, exact = (
            run(Draw(torch.Generator().manual_seed(seed), device, dtype, held)) for held in (dtype, torch.float64)
        )
        return next(_too_far(actual, exact), None)
    except Exception as error:  # Compilers and drivers raise errors of any kind.
        logger.debug("The self-check of an operation failed.", exc_info=True)
        return f"it fails: {(str(error).splitlines() or [''])[0] or type(error).__name__}"


def _too_far(actual: Outputs, exact: Outputs) -> Iterator[str]:
    """Yields a part of a sentence for each tensor whose error is too large, as a whole or in a row."""
    for name, values in actual.items():
        dtype, expected = values.dtype, exact[name]
        explained = torch.finfo(dtype).eps, _SUM * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        difference_N, norm_N = _squares(values.double() - expected), _squares(expected)
        whole = float((difference_N.sum() / norm_N.sum()).sqrt())
        row = float((difference_N / norm_N.clamp_min(norm_N.mean() / 4)).max().sqrt())
        for off, units, where in ((whole, _WHOLE, "the whole"), (row, _ROW, "a row")):
            most = units * explained[0] + explained[1]
            if not off <= most:  # True for nan, too.
                shown = str(dtype).removeprefix("torch.")
                yield f"{name} is {off:.2%} off the reference in {where}, and {shown} explains {most:.2%}"


def _squares(x: torch.Tensor) -> torch.Tensor:
    """[N] sums of squares of rows; each element of a vector is a row."""
    rows = x.detach().flatten(1) if x.dim() > 1 else x.detach()[:, None]
    return rows.square().sum(1)


def _operations(widths: Widths) -> dict[Operation, Callable[[Draw], Outputs]]:
    """The check of each operation: a function that runs it."""
    found: dict[Operation, Callable[[Draw], Outputs]] = {
        "rotation": lambda draw: _rotation(draw, widths),
        "SwiGLU": lambda draw: _swiglu(draw, widths.ffn) | _scaled_gate(draw, widths),
        "RMSNorm": lambda draw: _norms(draw, widths),
        "cross-entropy": _cross_entropy,
        "weight gradients": _weight_gradients,
        "row sums": lambda draw: _row_sums(draw, widths.head_dim),
        "expert sums": lambda draw: _expert_sums(draw, widths.hidden),
    }
    if widths.experts:  # else no rank waits for its kernel to be compiled
        found["router products"] = _router_products
        found["expert numbers"] = _expert_numbers
        found["expert gradients"] = _expert_gradients
    if widths.expert_biases:
        found["bias gradients"] = _bias_gradients
    return found


def _rotation(draw: Draw, widths: Widths) -> Outputs:
    heads, groups, dim = widths.heads, widths.kv_heads, widths.head_dim
    mixed_NF = draw(_ROWS, (heads + 2 * groups) * dim).requires_grad_()
    angles_NE = 1e3 * torch.rand(_ROWS, dim // 2, generator=draw.generator)
    rotation = Rotation(angles_NE.cos().to(draw.device), angles_NE.sin().to(draw.device))
    q_NHD, kv_N2GD = split_and_rotate(mixed_NF, rotation, groups)
    upstream = [draw(*q_NHD.shape), draw(*kv_N2GD.shape)]
    (d_mixed_NF,) = torch.autograd.grad((q_NHD, kv_N2GD), mixed_NF, upstream)
    found = {"q": q_NHD, "k, v": kv_N2GD, "the projection's gradient": d_mixed_NF}
    if not widths.head_norms:
        return found
    query_D, key_D = (draw(dim).requires_grad_() for _ in range(2))
    normed = split_and_rotate(mixed_NF, rotation, groups, HeadNorms(query_D, key_D, 1e-5))
    d_mixed_NF, d_query_D, d_key_D = torch.autograd.grad(normed, (mixed_NF, query_D, key_D), upstream)
    found |= {"normed q": normed[0], "normed k, v": normed[1], "the projection's gradient through norms": d_mixed_NF}
    return found | {"the gradient of q's factors": d_query_D[None], "the gradient of k's factors": d_key_D[None]}


def _swiglu(draw: Draw, ffn: int) -> Outputs:
    x = draw(_ROWS, 2 * ffn).requires_grad_()
    out = swiglu(x)
    (d_x,) = torch.autograd.grad(out, x, draw(_ROWS, ffn))
    return {"the output": out, "the input's gradient": d_x}


def _scaled_gate(draw: Draw, widths: Widths) -> Outputs:
    """The activation of experts, with a factor on each row, and with numbers on both sides of the gate's limit."""
    power = math.frexp(widths.gate.limit)[1]  # A power of two keeps numbers exact in every dtype.
    x = (2.0**power * draw(_ROWS, 2 * widths.ffn)).requires_grad_()
    factors = draw.wide(_ROWS).requires_grad_()
    scaled = swiglu(x, factors, widths.gate)
    d_scaled, d_factors = torch.autograd.grad(scaled, (x, factors), draw(_ROWS, widths.ffn))
    return {"the scaled output": scaled, "its input's gradient": d_scaled, "the factors' gradient": d_factors}


def _norms(draw: Draw, widths: Widths) -> Outputs:
    found = _norm(draw, widths.hidden) | _norm(draw, widths.head_dim, " of a head") | _added_norm(draw, widths.hidden)
    for columns in widths.latent:
        found |= _norm(draw, columns, f" of {columns} latent columns", beside=columns // 8)
    return found


def _norm(draw: Draw, columns: int, of: str = "", beside: int = 0) -> Outputs:
    """A norm of the first ``columns`` of rows that have ``beside`` further columns."""
    x, weight = draw(_ROWS, columns + beside)[:, :columns].requires_grad_(), draw(columns).requires_grad_()
    out = rms_norm(x, weight, 1e-5)
    d_x, d_weight = torch.autograd.grad(out, (x, weight), draw(_ROWS, columns))
    return {f"the output{of}": out, f"the input's gradient{of}": d_x, f"the weight's gradient{of}": d_weight[None]}


def _added_norm(draw: Draw, columns: int) -> Outputs:
    """The norms of a layer: a branch is added and the sum is normalised, twice in a row."""
    x, branch, weight = (draw(*shape).requires_grad_() for shape in ((_ROWS, columns), (_ROWS, columns), (columns,)))
    total, normed = add_rms_norm(x, branch, weight, 1e-5)
    same, again = add_rms_norm(total, None, weight, 1e-5)
    upstream = [draw(_ROWS, columns) for _ in range(3)]
    outputs = {"the sum": total, "the sum's norm": normed, "the sum's norm again": again}
    found = torch.autograd.grad((same, normed, again), (x, branch, weight), upstream)
    names = ("the residual stream's gradient", "the branch's gradient", "the weight's gradient of sums")
    return outputs | dict(zip(names, (*found[:2], found[2][None]), strict=True))


def _cross_entropy(draw: Draw) -> Outputs:
    logits_NV = 2 * draw(_ROWS, _COLUMNS)
    targets_N = torch.randint(-_COLUMNS // 4, _COLUMNS, (_ROWS,), generator=draw.generator).to(draw.device)
    maximum_N, sum_N, target_N = row_statistics(logits_NV, targets_N)
    lse_N = maximum_N + sum_N.log()
    logits_to_gradient_(logits_NV, targets_N, lse_N, draw.wide(_ROWS))
    return {"log-sum-exp": lse_N, "the targets' logits": target_N, "the logits' gradient": logits_NV}


def _weight_gradients(draw: Draw) -> Outputs:
    a_NV, b_NH = draw(_ROWS, 256), draw(_ROWS, 128)
    sum_VH = draw.wide(256, 128)
    add_product(sum_VH, a_NV.t(), b_NH)
    return {"the sum": sum_VH}


def _row_sums(draw: Draw, columns: int) -> Outputs:
    a_ND, b_ND = draw(_ROWS, columns), draw(_ROWS, columns)
    return {"the sums": row_dots(a_ND, b_ND)[:, None]}


def _router_products(draw: Draw) -> Outputs:
    hidden, experts = 1024, 16
    x, weight = draw(_ROWS, hidden).requires_grad_(), draw(experts, hidden).requires_grad_()
    logits = router_linear(x, weight)
    d_x, d_weight = torch.autograd.grad(logits, (x, weight), draw.wide(_ROWS, experts))
    return {"the logits": logits, "the rows' gradient": d_x, "the weight's gradient": d_weight}


def _expert_numbers(draw: Draw) -> Outputs:
    experts, topk = 44, 8
    of_rows = torch.rand(_ROWS, experts, generator=draw.generator).topk(topk).indices
    chosen = torch.zeros(_ROWS, experts, dtype=torch.bool).scatter(1, of_rows, True).to(draw.device)
    # The kernel would compute both runs, since the table is not of numbers.
    is_reference = draw.held == torch.float64
    numbers = of_rows.sort(1).values.to(draw.device) if is_reference else expert_numbers(chosen, topk)
    return {"the numbers": numbers.float()}  # exact, so that one wrong number is more than rounding explains


def _expert_sums(draw: Draw, columns: int) -> Outputs:
    """The sums of experts' outputs; half of the pairs have no output on this rank."""
    experts = 4
    pair_RK = torch.randperm(2 * _ROWS * experts, generator=draw.generator)[: _ROWS * experts].view(_ROWS, experts)
    return {"the sums": expert_sums(draw(_ROWS * experts, columns), pair_RK.to(draw.device))}


def _expert_gradients(draw: Draw) -> Outputs:
    """Products of four experts' weights, of which one has no rows, and gradients that are added to main gradients."""
    rows, outputs, inputs = [_ROWS - 31, 0, 30, 1], 144, 272  # more than a block of the kernel, and parts of one
    x, d_out = draw(_ROWS, inputs).requires_grad_(), draw(_ROWS, outputs)
    weights, sums = draw(len(rows), outputs, inputs), draw.wide(len(rows), outputs, inputs)
    experts: list[Any] = [each.requires_grad_() for each in weights.unbind()]
    for weight, total in zip(experts, sums.unbind(), strict=True):
        weight.main_grad = total
    ends = torch.tensor(rows).cumsum(0).int().to(draw.device)
    out = grouped_linear(x, experts, Groups(rows, ends), into_main_grad=True)
    out.backward(d_out)
    assert x.grad is not None
    return {"the product": out, "the rows' gradient": x.grad, "the sums": sums.flatten(0, 1)}


def _bias_gradients(draw: Draw) -> Outputs:
    """The gradients of four experts' biases, of which one has no rows."""
    rows, columns = [_ROWS - 31, 0, 30, 1], 272
    ends = torch.tensor(rows).cumsum(0).int().to(draw.device)
    biases = [draw(columns).requires_grad_() for _ in rows]
    out = add_biases(draw(_ROWS, columns), biases, Groups(rows, ends), draw.wide(_ROWS))
    return {"the biases' gradients": torch.stack(torch.autograd.grad(out, biases, draw(*out.shape)))}
