"""The linear layers of a rank's experts: each expert's weight is applied to the rows that were sent to this expert.

Rows are sorted by expert. On Hopper one grouped product of torch computes all experts, elsewhere one product each.
``megatron_patches/experts/grouped.py`` builds the experts' MLPs from this.

Array legend: P rows, those of one expert after those of the other; E experts; I and O columns of the input and of the
output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from distca.ops.cross_entropy import wide
from distca.ops.output_loss import add_product
from distca.ops.row_sums import row_dots
from distca.ops.triton import has_kernels, is_trusted

_HOPPER = (9, 0)
"""The compute capability of the GPUs for which torch's grouped product is used."""
_ALIGNED = 8
"""Columns of operands must be a multiple of it: torch's grouped product needs strides of 16 bytes, 8 bfloat16 numbers.
Other sizes are computed expert by expert."""


@dataclass(frozen=True)
class Groups:
    """The numbers of rows of each expert.

    Attributes:
        rows: number of rows of each expert, on the host.
        ends_E: int32 one past the last row of each expert, on the rows' device.
    """

    rows: list[int]
    ends_E: torch.Tensor


def grouped_linear(
    x_PI: torch.Tensor, weights: Sequence[torch.Tensor], groups: Groups, into_main_grad: bool = False
) -> torch.Tensor:
    """Returns [P, O], each row times its expert's weight transposed; can be differentiated once.

    Args:
        x_PI: rows, contiguous.
        weights: [O, I] of each expert.
        groups: the numbers of rows of each expert.
        into_main_grad: whether gradients of weights are added to their ``main_grad``, as Megatron-Core's linear layers
            do with ``gradient_accumulation_fusion``.
    """
    out: torch.Tensor = _GroupedLinear.apply(x_PI, groups, into_main_grad, *weights)
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_PI: torch.Tensor, groups: Groups, into_main_grad: bool, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x_PI)
        ctx.groups, ctx.into_main_grad, ctx.weights = groups, into_main_grad, weights
        return _products(x_PI, weights, groups, transposed=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_PO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (x_PI,) = ctx.saved_tensors
        d_PO, groups = d_PO.contiguous(), ctx.groups
        d_x = _products(d_PO, ctx.weights, groups, transposed=False) if ctx.needs_input_grad[0] else None
        if ctx.into_main_grad and all(ctx.needs_input_grad[3:]) and _come_at_once(ctx.weights, x_PI):
            return d_x, None, None, *_all_into_main_grads(ctx.weights, d_PO, x_PI, groups)
        parts = zip(
            ctx.weights, ctx.needs_input_grad[3:], d_PO.split(groups.rows), x_PI.split(groups.rows), strict=True
        )
        gradient = _into_main_grads(ctx.weights) if ctx.into_main_grad else _product
        return d_x, None, None, *(gradient(w, d, x) if needed else None for w, needed, d, x in parts)


def add_biases(
    x_PO: torch.Tensor, biases: Sequence[torch.Tensor], groups: Groups, scale_P: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns [P, O], each row plus its expert's bias; can be differentiated once.

    Args:
        x_PO: rows.
        biases: [O] of each expert.
        groups: the numbers of rows of each expert.
        scale_P: a factor on the bias for each row; None for 1.
    """
    out: torch.Tensor = _AddBiases.apply(x_PO, scale_P, groups, *biases)
    return out


class _AddBiases(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_PO: torch.Tensor, scale_P: torch.Tensor | None, groups: Groups, *biases: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(scale_P, *biases)
        ctx.groups = groups
        bias_PO = _of_rows(biases, groups, len(x_PO))
        if scale_P is None:
            return x_PO + bias_PO
        return torch.addcmul(x_PO, bias_PO, scale_P[:, None], out=bias_PO)  # one pass on GPUs, cast included

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_PO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        scale_P, *biases = ctx.saved_tensors
        d_scale, needed, rows_PO = None, ctx.needs_input_grad[3:], d_PO.contiguous()
        if scale_P is not None and ctx.needs_input_grad[1]:
            d_scale = row_dots(rows_PO, _of_rows(biases, ctx.groups, len(d_PO))).to(scale_P.dtype)
        if not any(needed):
            return d_PO, d_scale, None, *[None] * len(biases)
        sums_EO = expert_row_sums(rows_PO, ctx.groups, scale_P).to(biases[0].dtype)
        return d_PO, d_scale, None, *(each if wanted else None for each, wanted in zip(sums_EO, needed, strict=True))


def expert_row_sums(x_PO: torch.Tensor, groups: Groups, scale_P: torch.Tensor | None = None) -> torch.Tensor:
    """Returns [E, O], for each expert the sum of its rows, without autograd.

    Products and sums are at least float32, in an order that is the same in each run.

    Args:
        x_PO: rows, contiguous.
        groups: the numbers of rows of each expert.
        scale_P: a factor on each row; None for 1.
    """
    if has_kernels(x_PO, "bias gradients"):
        from distca.ops.triton.bias_gradients import expert_row_sums as kernel

        return kernel(x_PO, None if scale_P is None else scale_P.contiguous(), groups.ends_E)
    sums_EO = x_PO.new_empty(len(groups.rows), x_PO.shape[1], dtype=wide(x_PO.dtype))
    factors = [None] * len(groups.rows) if scale_P is None else scale_P.split(groups.rows)
    for total, part, factor in zip(sums_EO, x_PO.split(groups.rows), factors, strict=True):
        part = part.to(total.dtype)
        torch.sum(part if factor is None else part * factor[:, None], 0, out=total)
    return sums_EO


def _of_rows(biases: Sequence[torch.Tensor], groups: Groups, rows: int) -> torch.Tensor:
    """[P, O] the bias of each row's expert, computed on the device without waiting for it."""
    numbers_P = torch.arange(rows, dtype=groups.ends_E.dtype, device=groups.ends_E.device)
    expert_P = torch.searchsorted(groups.ends_E, numbers_P, right=True)
    return torch.stack(tuple(biases)).index_select(0, expert_P)


def _product(_: torch.Tensor, d_out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The gradient of a weight."""
    return d_out.t() @ rows


def _into_main_grads(weights: Sequence[torch.Tensor]) -> Any:
    """Returns a function that adds a weight's gradient to its ``main_grad``, and returns what autograd gets."""
    unread = torch.empty_like(weights[0])

    def add(weight: Any, d_out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        if len(rows):
            add_product(weight.main_grad, d_out.t(), rows)
        return _note_added(weight, unread)

    return add


def _note_added(weight: Any, unread: torch.Tensor) -> torch.Tensor | None:
    """Returns a tensor without values, or None if autograd has one already in this backward pass.

    Megatron's hooks only need to see that a gradient has come, and do not read it. If a weight was used by both parts
    of a micro-batch, autograd would add up two such tensors, in a launch for each weight."""
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
    backward_pass = torch._C._current_graph_task_id()  # another number in each, also in one inside another
    if getattr(weight, "noted_in_pass", None) == backward_pass:
        return None
    weight.noted_in_pass = backward_pass
    return unread.view_as(weight)


def _come_at_once(weights: Sequence[Any], x_PI: torch.Tensor) -> bool:
    """Whether one kernel adds all experts' gradients to their ``main_grad``."""
    if not (x_PI.is_cuda and is_grouped(x_PI, weights[0]) and has_kernels(x_PI, "expert gradients")):
        return False
    return weights[0].main_grad.dtype == torch.float32 and lie_evenly([weight.main_grad for weight in weights])


def _all_into_main_grads(
    weights: Sequence[Any], d_PO: torch.Tensor, x_PI: torch.Tensor, groups: Groups
) -> list[torch.Tensor | None]:
    """Does what :func:`_into_main_grads` says for all weights, of which ``main_grad`` lie evenly."""
    from distca.ops.triton.expert_gradients import add_expert_gradients

    add_expert_gradients(_together([weight.main_grad for weight in weights]), d_PO, x_PI, groups.ends_E)
    unread = torch.empty_like(weights[0])
    return [_note_added(weight, unread) for weight in weights]


def _products(x_PI: torch.Tensor, weights: Sequence[torch.Tensor], groups: Groups, *, transposed: bool) -> torch.Tensor:
    """Each row times its expert's weight, or with ``transposed`` times the weight's transpose."""
    columns = weights[0].shape[0 if transposed else 1]
    if not len(x_PI):
        return x_PI.new_zeros(0, columns)
    if is_grouped(x_PI, weights[0]):
        weight_EOI = _together(weights)
        operand = weight_EOI.transpose(1, 2) if transposed else weight_EOI
        grouped: torch.Tensor = torch.nn.functional.grouped_mm(x_PI, operand, offs=groups.ends_E)
        return grouped
    out = x_PI.new_empty(len(x_PI), columns)
    for weight, rows, into in zip(weights, x_PI.split(groups.rows), out.split(groups.rows), strict=True):
        torch.mm(rows, weight.t() if transposed else weight, out=into)
    return out


def lie_evenly(weights: Sequence[torch.Tensor]) -> bool:
    """Whether weights lie at equal distances in one storage, so that a view of it is the operand of a grouped
    product."""
    first, places = weights[0], [each.data_ptr() for each in weights]
    distance = places[1] - places[0] if len(places) > 1 else first.nbytes
    even = places == [places[0] + number * distance for number in range(len(places))]
    if not (even and distance >= first.nbytes and distance % (_ALIGNED * first.element_size()) == 0):
        return False
    memory = first.untyped_storage()
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes()
    # What lies within a storage's memory belongs to it.
    return begin <= places[0] and places[-1] + first.nbytes <= end and all(each.is_contiguous() for each in weights)


def _together(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns all weights as [E, O, I]: a view if they lie evenly, else a copy.

    A copy costs each product the time to read and write all experts of the layer."""
    if not lie_evenly(weights):
        return torch.stack(tuple(weights))
    first = weights[0].detach()
    distance = weights[1].data_ptr() - first.data_ptr() if len(weights) > 1 else first.nbytes
    return first.as_strided((len(weights), *first.shape), (distance // first.element_size(), *first.stride()))


def is_grouped(x_PI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Whether torch's grouped product computes all experts at once; otherwise they come one after the other."""
    if any(size % _ALIGNED for size in weight_OI.shape) or not has_grouped_products(x_PI.dtype, x_PI.device):
        return False
    return not x_PI.is_cuda or is_trusted("expert gradients")  # whose check has grouped products, too


def has_grouped_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's grouped product is used on a device for rows of a dtype, if its check does not refuse it."""
    if not hasattr(torch.nn.functional, "grouped_mm"):
        return False
    if device.type == "cuda":
        # On Blackwell, torch's grouped product left the gradients of experts without rows uninitialised.
        return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) == _HOPPER
    return dtype == torch.float32  # Tests on CPUs thus call it, too.
