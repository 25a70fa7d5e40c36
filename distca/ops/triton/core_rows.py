"""Triton kernels between a projection and a recurrent core: convolution over pieces, SiLU, norms and copies of heads.

A *piece* is a run of a document's rows on one rank. The convolution reads for each row J rows, itself and J - 1 before
it. The rows before a piece's first row are its *halo*, which other ranks send (recurrent/convolution.py calls this).

Forward has one kernel for each of q, k and v. Backward computes the convolution again. One kernel for each of q, k and
v gives the gradients of the convolution's output; another gives those of its rows and weights. Sums are in float32 and
rounded once.

N rows, of which the first R are in pieces; P pieces; C channels; J rows that the convolution reads; U halo rows; D
columns of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

_ROWS, _ROWS_OF_WEIGHTS, _COLUMNS_OF_WEIGHTS = 16, 64, 64
"""Rows of a program; and rows and columns of a program that computes gradients of weights. They are not tuned."""

Taps = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The pieces in three tensors: int32 [R], int32 [P, 3] and int64.

The first has each row's piece. The second has each piece's first row, one past its last row, and the index of its first
halo row in the third tensor. That is -1 if the piece begins a document. The third has the numbers of halo rows among
the U rows that arrived, J - 1 for each piece that continues a document. U stands for a row before the document's
start."""


class Head:
    """The columns of the convolution that are heads of q, of k or of v.

    Args:
        first: the first of these columns.
        count: number of heads.
        dim: columns of a head.
        copies: how often each head is written to the output, for the heads of v that share it.
        epsilon: added to a head's squared norm, by whose root the head is divided; None for no norm.
    """

    def __init__(self, first: int, count: int, dim: int, copies: int = 1, epsilon: float | None = None) -> None:
        self.first, self.count, self.dim, self.copies, self.epsilon = first, count, dim, copies, epsilon


class CoreRowsOf(torch.autograd.Function):
    """``apply(mixed_NC, halo_UC, kernel_CJ, bias_C or None, taps, halo_pairs, heads)`` returns [N, heads, D] for each
    of ``heads``.

    ``halo_pairs`` are all pairs of a halo row and a row that reads it: the index in the third tensor of ``taps``, the
    reading row, and the distance of both; int64.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mixed_NC: torch.Tensor,
        halo_UC: torch.Tensor,
        kernel_CJ: torch.Tensor,
        bias_C: torch.Tensor | None,
        taps: Taps,
        halo_pairs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        heads: tuple[Head, ...],
    ) -> tuple[torch.Tensor, ...]:
        mixed_NC = mixed_NC if mixed_NC.stride(1) == 1 else mixed_NC.contiguous()
        halo_UC, kernel_CJ = halo_UC.contiguous(), kernel_CJ.contiguous()
        ctx.save_for_backward(mixed_NC, halo_UC, kernel_CJ, bias_C)
        ctx.taps, ctx.halo_pairs, ctx.heads = taps, halo_pairs, heads
        found = []
        for head in heads:
            out = mixed_NC.new_empty(len(mixed_NC), head.count * head.copies, head.dim)
            _launch(_core_rows_forward, head, out, mixed_NC, halo_UC, kernel_CJ, bias_C, taps)
            found.append(out)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        mixed_NC, halo_UC, kernel_CJ, bias_C = ctx.saved_tensors
        # Gradients of the convolution's output, before SiLU.
        d_found = torch.empty(mixed_NC.shape, dtype=mixed_NC.dtype, device=mixed_NC.device)
        for head, d_out in zip(ctx.heads, gradients, strict=True):
            _launch(
                _core_rows_backward, head, d_out.contiguous(), mixed_NC, halo_UC, kernel_CJ, bias_C, ctx.taps, d_found
            )
        d_mixed, d_kernel_JC = _of_rows(mixed_NC, kernel_CJ, d_found, ctx.taps)
        d_halo = _of_halo(halo_UC, kernel_CJ, d_found, d_kernel_JC, ctx.taps, ctx.halo_pairs)
        d_bias = None if bias_C is None else d_found.sum(0, dtype=torch.float32).to(bias_C.dtype)
        return d_mixed, d_halo, d_kernel_JC.T.to(kernel_CJ.dtype), d_bias, None, None, None


def _launch(
    function: Any,
    head: Head,
    out: torch.Tensor,
    mixed_NC: torch.Tensor,
    halo_UC: torch.Tensor,
    kernel_CJ: torch.Tensor,
    bias_C: torch.Tensor | None,
    taps: Taps,
    d_found: torch.Tensor | None = None,
) -> None:
    piece, table, picked = taps
    if not out.numel():
        return
    function[(triton.cdiv(len(mixed_NC), _ROWS), head.count)](
        mixed_NC,
        halo_UC,
        kernel_CJ,
        bias_C,
        piece,
        table,
        picked,
        out,
        d_found,
        len(mixed_NC),
        len(piece),
        len(halo_UC),
        mixed_NC.stride(0),
        mixed_NC.shape[1],
        head.first,
        head.dim,
        head.epsilon or 0.0,
        J=kernel_CJ.shape[1],
        NORM=head.epsilon is not None,
        COPIES=head.copies,
        ROWS=_ROWS,
        BLOCK=triton.next_power_of_2(head.dim),
        num_warps=4,
    )


def _of_rows(
    mixed_NC: torch.Tensor, kernel_CJ: torch.Tensor, d_found: torch.Tensor, taps: Taps
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of the rows, and [J, C] float32 those of the weights without the part of halo rows."""
    piece, table, _ = taps
    (rows, channels), taken = mixed_NC.shape, kernel_CJ.shape[1]
    d_mixed = torch.empty_like(d_found)
    tiles = triton.cdiv(rows, _ROWS_OF_WEIGHTS)
    shares = torch.empty(tiles, taken, channels, dtype=torch.float32, device=mixed_NC.device)
    if d_mixed.numel():
        _core_rows_gradients[(tiles, triton.cdiv(channels, _COLUMNS_OF_WEIGHTS))](
            mixed_NC,
            kernel_CJ,
            d_found,
            piece,
            table,
            d_mixed,
            shares,
            rows,
            len(piece),
            mixed_NC.stride(0),
            channels,
            J=taken,
            ROWS=_ROWS_OF_WEIGHTS,
            BLOCK=_COLUMNS_OF_WEIGHTS,
            num_warps=4,
        )
    return d_mixed, shares.sum(0)


def _of_halo(
    halo_UC: torch.Tensor,
    kernel_CJ: torch.Tensor,
    d_found: torch.Tensor,
    d_kernel_JC: torch.Tensor,
    taps: Taps,
    pairs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Returns the gradients of halo rows, and adds their part to the weights' gradients.

    Halo rows are few, so torch computes this."""
    place, row, between = pairs
    d_halo = torch.zeros(len(halo_UC) + 1, halo_UC.shape[1], dtype=torch.float32, device=halo_UC.device)
    if len(place):
        source, tap = taps[2].index_select(0, place), kernel_CJ.shape[1] - 1 - between
        gradient = d_found.index_select(0, row).float()
        d_halo.index_add_(0, source, gradient * kernel_CJ.T.index_select(0, tap).float())
        read = torch.cat((halo_UC, halo_UC.new_zeros(1, halo_UC.shape[1]))).index_select(0, source)
        d_kernel_JC.index_add_(0, tap, gradient * read.float())
    return d_halo[:-1].to(halo_UC.dtype)


@triton.jit
def _convolved(  # type: ignore[no-untyped-def]
    x, halo, kernel, bias, piece, table, picked, row, inside, column, is_column, rows_of_halo, stride, channels,
    J: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.load(piece + row, mask=inside, other=0)
    begin = tl.load(table + 3 * number, mask=inside, other=0)
    place = tl.load(table + 3 * number + 2, mask=inside, other=-1)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tap in tl.static_range(J):
        source = row - (J - 1 - tap)
        local = inside & (source >= begin)
        outside = inside & (source < begin) & (place >= 0)
        arrived = tl.load(picked + place + (J - 1) + source - begin, mask=outside, other=0)
        outside = outside & (arrived < rows_of_halo)
        weight = tl.load(kernel + column * J + tap, mask=is_column, other=0.0).to(tl.float32)
        here = tl.load(x + source[:, None] * stride + column, mask=local[:, None] & is_column, other=0.0)
        there = tl.load(halo + arrived[:, None] * channels + column, mask=outside[:, None] & is_column, other=0.0)
        total += (here.to(tl.float32) + there.to(tl.float32)) * weight
    if bias is not None:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    return tl.where(inside[:, None] & is_column, total, 0.0)


@triton.jit
def _core_rows_forward(  # type: ignore[no-untyped-def]
    x, halo, kernel, bias, piece, table, picked, out, _, rows, rows_of_pieces, rows_of_halo, stride, channels, first,
    dim, epsilon, J: tl.constexpr, NORM: tl.constexpr, COPIES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    within = tl.arange(0, BLOCK)[None, :]
    column, is_column, inside = first + head * dim + within, within < dim, row < rows_of_pieces
    found = _convolved(
        x, halo, kernel, bias, piece, table, picked, row, inside, column, is_column, rows_of_halo, stride, channels,
        J, ROWS, BLOCK,
    )  # fmt: skip
    value = found * tl.sigmoid(found)
    if NORM:
        value *= tl.rsqrt(tl.sum(value * value, axis=1) + epsilon)[:, None]
    place = out + (row[:, None] * tl.num_programs(1) + head) * COPIES * dim + within
    for copy in tl.static_range(COPIES):
        tl.store(place + copy * dim, value.to(out.dtype.element_ty), mask=(row < rows)[:, None] & is_column)


@triton.jit
def _core_rows_backward(  # type: ignore[no-untyped-def]
    x, halo, kernel, bias, piece, table, picked, d_out, d_found, rows, rows_of_pieces, rows_of_halo, stride, channels,
    first, dim, epsilon,
    J: tl.constexpr, NORM: tl.constexpr, COPIES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    within = tl.arange(0, BLOCK)[None, :]
    column, is_column, inside = first + head * dim + within, within < dim, row < rows_of_pieces
    found = _convolved(
        x, halo, kernel, bias, piece, table, picked, row, inside, column, is_column, rows_of_halo, stride, channels,
        J, ROWS, BLOCK,
    )  # fmt: skip
    sigmoid = tl.sigmoid(found)
    value = found * sigmoid
    gradient = tl.zeros((ROWS, BLOCK), tl.float32)
    place = d_out + (row[:, None] * tl.num_programs(1) + head) * COPIES * dim + within
    for copy in tl.static_range(COPIES):
        gradient += tl.load(place + copy * dim, mask=inside[:, None] & is_column, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, axis=1) + epsilon)
        along = tl.sum(value * gradient, axis=1)
        gradient = scale[:, None] * (gradient - value * (scale * scale * along)[:, None])
    gradient *= sigmoid + value * (1.0 - sigmoid)
    # Rows of padding get zeros.
    place = d_found + row[:, None] * channels + column
    tl.store(place, gradient.to(d_found.dtype.element_ty), mask=(row < rows)[:, None] & is_column)


@triton.jit
def _core_rows_gradients(  # type: ignore[no-untyped-def]
    x, kernel, d_found, piece, table, d_x, shares, rows, rows_of_pieces, stride, channels,
    J: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    is_column, inside = column < channels, row < rows_of_pieces
    number = tl.load(piece + row, mask=inside, other=0)
    end = tl.load(table + 3 * number + 1, mask=inside, other=0)
    value = tl.load(x + row[:, None] * stride + column, mask=inside[:, None] & is_column, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for between in tl.static_range(J):
        reader = row + between
        there = (inside & (reader < end))[:, None] & is_column
        gradient = tl.load(d_found + reader[:, None] * channels + column, mask=there, other=0.0).to(tl.float32)
        weight = tl.load(kernel + column * J + (J - 1 - between), mask=is_column, other=0.0).to(tl.float32)
        total += gradient * weight
        share = shares + (tl.program_id(0).to(tl.int64) * J + (J - 1 - between)) * channels + column
        tl.store(share, tl.sum(value * gradient, axis=0)[None, :], mask=is_column)
    place = d_x + row[:, None] * channels + column
    tl.store(place, total.to(d_x.dtype.element_ty), mask=(row < rows)[:, None] & is_column)
