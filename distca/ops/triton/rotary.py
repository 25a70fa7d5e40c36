"""Triton kernel that splits a QKV projection into q and k,v and rotates q and k, in one pass; also for backward."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable


def split_and_rotate(
    mixed_NF: torch.Tensor, cos_NE: torch.Tensor, sin_NE: torch.Tensor, groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what :func:`distca.ops.rotary.split_and_rotate` says."""
    q_NHD, kv_N2GD = _SplitAndRotate.apply(mixed_NF, cos_NE, sin_NE, groups)  # type: ignore[no-untyped-call]
    return q_NHD, kv_N2GD


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed_NF: torch.Tensor, cos_NE: torch.Tensor, sin_NE: torch.Tensor, groups: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, dim = len(mixed_NF), 2 * cos_NE.shape[1]
        heads = mixed_NF.shape[1] // dim - 2 * groups
        q_NHD = mixed_NF.new_empty(rows, heads, dim)
        kv_N2GD = mixed_NF.new_empty(rows, 2, groups, dim)
        ctx.save_for_backward(cos_NE, sin_NE)
        _launch(mixed_NF.contiguous(), q_NHD, kv_N2GD, cos_NE, sin_NE, backward=False)
        return q_NHD, kv_N2GD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_q_NHD: torch.Tensor, d_kv_N2GD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        cos_NE, sin_NE = ctx.saved_tensors
        d_mixed_NF = d_q_NHD.new_empty(len(d_q_NHD), d_q_NHD.shape[1:].numel() + d_kv_N2GD.shape[1:].numel())
        _launch(d_mixed_NF, d_q_NHD.contiguous(), d_kv_N2GD.contiguous(), cos_NE, sin_NE, backward=True)
        return d_mixed_NF, None, None, None


def _launch(
    mixed_NF: torch.Tensor,
    q_NHD: torch.Tensor,
    kv_N2GD: torch.Tensor,
    cos_NE: torch.Tensor,
    sin_NE: torch.Tensor,
    backward: bool,
) -> None:
    rows, heads, dim = q_NHD.shape
    groups = kv_N2GD.shape[2]
    if rows:
        _rotate[(rows,)](
            mixed_NF,
            q_NHD,
            kv_N2GD,
            cos_NE,
            sin_NE,
            HEADS=heads,
            GROUPS=groups,
            HALF=dim // 2,
            BLOCK_HEADS=triton.next_power_of_2(heads + 2 * groups),
            BLOCK_HALF=triton.next_power_of_2(dim // 2),
            BACKWARD=backward,
            num_warps=4,
        )


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    mixed,
    q,
    kv,
    cos,
    sin,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BACKWARD: tl.constexpr,
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
    first, second = a * c - b * s, b * c + a * s
    if BACKWARD:
        tl.store(mixed_at, first.to(mixed.dtype.element_ty), mask=inside)
        tl.store(mixed_at + HALF, second.to(mixed.dtype.element_ty), mask=inside)
    else:
        tl.store(q_at, first.to(q.dtype.element_ty), mask=inside & is_q)
        tl.store(q_at + HALF, second.to(q.dtype.element_ty), mask=inside & is_q)
        tl.store(kv_at, first.to(kv.dtype.element_ty), mask=inside & ~is_q)
        tl.store(kv_at + HALF, second.to(kv.dtype.element_ty), mask=inside & ~is_q)
