"""Triton kernels that split a QKV projection into q and k,v, normalise heads of q and k, and rotate them, in one pass.

In the projection each group has its heads side by side: its query heads, its key and its value. Kernels hold a head as
two halves, of which element i of one is turned with element i of the other.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

Norms = tuple[torch.Tensor, torch.Tensor, float]
"""The values of :class:`distca.ops.rotary.HeadNorms`."""

_GROUPS_PER_PROGRAM = 64
"""Groups of a program in backward through norms, which adds up its heads' part of the factors' gradients."""
_MOST_PROGRAMS = 4096
"""The largest number of programs in backward through norms; with more groups each program has more than 64."""


def split_and_rotate(
    mixed_NF: torch.Tensor, cos_NE: torch.Tensor, sin_NE: torch.Tensor, groups: int, norms: Norms | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what :func:`distca.ops.rotary.split_and_rotate` says."""
    if norms is None:
        q_NHD, kv_N2GD = _SplitAndRotate.apply(mixed_NF, cos_NE, sin_NE, groups)  # type: ignore[no-untyped-call]
    else:
        q_NHD, kv_N2GD = _NormalizeSplitAndRotate.apply(mixed_NF, cos_NE, sin_NE, groups, *norms)  # type: ignore[no-untyped-call]
    return q_NHD, kv_N2GD


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed_NF: torch.Tensor, cos_NE: torch.Tensor, sin_NE: torch.Tensor, groups: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos_NE, sin_NE)
        return _forward(mixed_NF.contiguous(), cos_NE, sin_NE, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_q_NHD: torch.Tensor, d_kv_N2GD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        cos_NE, sin_NE = ctx.saved_tensors
        d_mixed_NF = d_q_NHD.new_empty(len(d_q_NHD), d_q_NHD.shape[1:].numel() + d_kv_N2GD.shape[1:].numel())
        _launch(d_mixed_NF, d_q_NHD.contiguous(), d_kv_N2GD.contiguous(), cos_NE, sin_NE, backward=True)
        return d_mixed_NF, None, None, None


class _NormalizeSplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed_NF: torch.Tensor,
        cos_NE: torch.Tensor,
        sin_NE: torch.Tensor,
        groups: int,
        query_D: torch.Tensor,
        key_D: torch.Tensor,
        epsilon: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mixed_NF, ctx.epsilon = mixed_NF.contiguous(), epsilon
        ctx.save_for_backward(mixed_NF, cos_NE, sin_NE, query_D, key_D)
        return _forward(mixed_NF, cos_NE, sin_NE, groups, (query_D, key_D, epsilon))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_q_NHD: torch.Tensor, d_kv_N2GD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        mixed_NF, cos_NE, sin_NE, query_D, key_D = ctx.saved_tensors
        d_mixed_NF, (rows, heads, dim), groups = torch.empty_like(mixed_NF), d_q_NHD.shape, d_kv_N2GD.shape[2]
        programs = max(min(triton.cdiv(rows * groups, _GROUPS_PER_PROGRAM), _MOST_PROGRAMS), 1)
        # The programs' parts are added up in a fixed order, so the sum has the same bits every time.
        shares_P2D = torch.zeros(programs, 2, dim, dtype=torch.float32, device=mixed_NF.device)
        if rows:
            _normed_backward[(programs,)](
                mixed_NF,
                d_q_NHD.contiguous(),
                d_kv_N2GD.contiguous(),
                cos_NE,
                sin_NE,
                query_D,
                key_D,
                d_mixed_NF,
                shares_P2D,
                rows * groups,
                triton.cdiv(rows * groups, programs),
                programs,
                ctx.epsilon,
                QUERIES=heads // groups,
                GROUPS=groups,
                HALF=dim // 2,
                BLOCK_HEADS=triton.next_power_of_2(heads // groups + 2),
                BLOCK_HALF=triton.next_power_of_2(dim // 2),
                num_warps=4,
            )
        d_query_D, d_key_D = shares_P2D.sum(0)
        return d_mixed_NF, None, None, None, d_query_D.to(query_D.dtype), d_key_D.to(key_D.dtype), None


def _forward(
    mixed_NF: torch.Tensor,
    cos_NE: torch.Tensor,
    sin_NE: torch.Tensor,
    groups: int,
    norms: Norms | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, dim = len(mixed_NF), 2 * cos_NE.shape[1]
    heads = mixed_NF.shape[1] // dim - 2 * groups
    q_NHD = mixed_NF.new_empty(rows, heads, dim)
    kv_N2GD = mixed_NF.new_empty(rows, 2, groups, dim)
    _launch(mixed_NF, q_NHD, kv_N2GD, cos_NE, sin_NE, norms=norms)
    return q_NHD, kv_N2GD


def _launch(
    mixed_NF: torch.Tensor,
    q_NHD: torch.Tensor,
    kv_N2GD: torch.Tensor,
    cos_NE: torch.Tensor,
    sin_NE: torch.Tensor,
    backward: bool = False,
    norms: Norms | None = None,
) -> None:
    rows, heads, dim = q_NHD.shape
    groups = kv_N2GD.shape[2]
    query_D, key_D, epsilon = norms or (cos_NE, cos_NE, 0.0)  # without norms these are not read
    if rows:
        _rotate[(rows,)](
            mixed_NF,
            q_NHD,
            kv_N2GD,
            cos_NE,
            sin_NE,
            query_D,
            key_D,
            epsilon,
            HEADS=heads,
            GROUPS=groups,
            HALF=dim // 2,
            BLOCK_HEADS=triton.next_power_of_2(heads + 2 * groups),
            BLOCK_HALF=triton.next_power_of_2(dim // 2),
            BACKWARD=backward,
            NORMS=norms is not None,
            num_warps=4,
        )


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    mixed,
    q,
    kv,
    cos,
    sin,
    query,
    key,
    epsilon,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BACKWARD: tl.constexpr,
    NORMS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slots: tl.constexpr = HEADS // GROUPS + 2  # heads of a group in the projection: its query heads, key and value
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    lane = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < HEADS + 2 * GROUPS) & (lane < HALF)
    group, slot = head // slots, head % slots
    is_q, is_v = slot < slots - 2, slot == slots - 1
    mixed_at = mixed + (row * (HEADS + 2 * GROUPS) + head) * 2 * HALF + lane
    q_at = q + (row * HEADS + group * (slots - 2) + slot) * 2 * HALF + lane
    kv_at = kv + (row * 2 * GROUPS + tl.where(is_v, GROUPS, 0) + group) * 2 * HALF + lane
    c = tl.load(cos + row * HALF + lane, mask=lane < HALF, other=1.0)
    s = tl.load(sin + row * HALF + lane, mask=lane < HALF, other=0.0)
    c, s = tl.where(is_v, 1.0, c), tl.where(is_v, 0.0, s)
    if BACKWARD:
        a = tl.load(q_at, mask=inside & is_q, other=0.0) + tl.load(kv_at, mask=inside & ~is_q, other=0.0)
        b = tl.load(q_at + HALF, mask=inside & is_q, other=0.0) + tl.load(kv_at + HALF, mask=inside & ~is_q, other=0.0)
        s = -s
    else:
        a = tl.load(mixed_at, mask=inside, other=0.0)
        b = tl.load(mixed_at + HALF, mask=inside, other=0.0)
    a, b = a.to(tl.float32), b.to(tl.float32)
    if NORMS:
        inverse = _inverse(a, b, is_v, epsilon, HALF)
        a *= inverse * _factors(query, key, lane, is_q, is_v, lane < HALF)
        b *= inverse * _factors(query + HALF, key + HALF, lane, is_q, is_v, lane < HALF)
    first, second = a * c - b * s, b * c + a * s
    if BACKWARD:
        tl.store(mixed_at, first.to(mixed.dtype.element_ty), mask=inside)
        tl.store(mixed_at + HALF, second.to(mixed.dtype.element_ty), mask=inside)
    else:
        tl.store(q_at, first.to(q.dtype.element_ty), mask=inside & is_q)
        tl.store(q_at + HALF, second.to(q.dtype.element_ty), mask=inside & is_q)
        tl.store(kv_at, first.to(kv.dtype.element_ty), mask=inside & ~is_q)
        tl.store(kv_at + HALF, second.to(kv.dtype.element_ty), mask=inside & ~is_q)


@triton.jit
def _normed_backward(  # type: ignore[no-untyped-def]
    mixed,
    d_q,
    d_kv,
    cos,
    sin,
    query,
    key,
    d_mixed,
    shares,
    count,
    steps,
    programs,
    epsilon,
    QUERIES: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Computes ``steps`` of the ``count`` groups of all rows, of which a row has ``GROUPS``."""
    program = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK_HEADS)[:, None]
    lane = tl.arange(0, BLOCK_HALF)[None, :]
    is_q, is_v = slot < QUERIES, slot == QUERIES + 1
    a_factors = _factors(query, key, lane, is_q, is_v, lane < HALF)
    b_factors = _factors(query + HALF, key + HALF, lane, is_q, is_v, lane < HALF)
    a_share = tl.zeros((BLOCK_HEADS, BLOCK_HALF), tl.float32)
    b_share = tl.zeros((BLOCK_HEADS, BLOCK_HALF), tl.float32)
    for step in range(0, steps):
        number = program + step * programs
        row, group = number // GROUPS, number % GROUPS
        inside = (slot < QUERIES + 2) & (lane < HALF) & (number < count)
        at = (number * (QUERIES + 2) + slot) * 2 * HALF + lane
        q_at = d_q + (number * QUERIES + slot) * 2 * HALF + lane
        kv_at = d_kv + (row * 2 * GROUPS + tl.where(is_v, GROUPS, 0) + group) * 2 * HALF + lane
        c = tl.load(cos + row * HALF + lane, mask=(lane < HALF) & (number < count), other=1.0)
        s = tl.load(sin + row * HALF + lane, mask=(lane < HALF) & (number < count), other=0.0)
        c, s = tl.where(is_v, 1.0, c), tl.where(is_v, 0.0, s)
        a = tl.load(q_at, mask=inside & is_q, other=0.0) + tl.load(kv_at, mask=inside & ~is_q, other=0.0)
        b = tl.load(q_at + HALF, mask=inside & is_q, other=0.0) + tl.load(kv_at + HALF, mask=inside & ~is_q, other=0.0)
        a, b = a.to(tl.float32), b.to(tl.float32)
        a, b = a * c + b * s, b * c - a * s  # the gradient of what was turned
        x = tl.load(mixed + at, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(mixed + at + HALF, mask=inside, other=0.0).to(tl.float32)
        inverse = _inverse(x, y, is_v, epsilon, HALF)
        x, y = x * inverse, y * inverse
        a_share += a * x
        b_share += b * y
        a, b = a * a_factors, b * b_factors
        mean = tl.sum(a * x + b * y, 1)[:, None] / (2 * HALF)
        mean = tl.where(is_v, 0.0, mean)
        tl.store(d_mixed + at, ((a - x * mean) * inverse).to(d_mixed.dtype.element_ty), mask=inside)
        tl.store(d_mixed + at + HALF, ((b - y * mean) * inverse).to(d_mixed.dtype.element_ty), mask=inside)
    share = shares + program * 4 * HALF + tl.arange(0, BLOCK_HALF)
    here = tl.arange(0, BLOCK_HALF) < HALF
    is_k = slot == QUERIES
    tl.store(share, tl.sum(tl.where(is_q, a_share, 0.0), 0), mask=here)
    tl.store(share + HALF, tl.sum(tl.where(is_q, b_share, 0.0), 0), mask=here)
    tl.store(share + 2 * HALF, tl.sum(tl.where(is_k, a_share, 0.0), 0), mask=here)
    tl.store(share + 3 * HALF, tl.sum(tl.where(is_k, b_share, 0.0), 0), mask=here)


@triton.jit
def _inverse(a, b, is_v, epsilon, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 over the root of the mean square of each head, of which ``a`` and ``b`` are the halves; 1 for values."""
    return tl.where(is_v, 1.0, 1.0 / tl.sqrt(tl.sum(a * a + b * b, 1)[:, None] / (2 * HALF) + epsilon))


@triton.jit
def _factors(query, key, lane, is_q, is_v, inside):  # type: ignore[no-untyped-def]
    """The factors of each head's elements, from those of queries and keys; 1 for values."""
    of_q = tl.load(query + lane, mask=inside, other=0.0).to(tl.float32)
    of_k = tl.load(key + lane, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_q, of_q, tl.where(is_v, 1.0, of_k))
