"""Triton kernel of the sums over the experts of a row, in one pass."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def expert_sums(x_PH: torch.Tensor, pair_RK: torch.Tensor, out_RH: torch.Tensor) -> None:
    """See :func:`distca.ops.expert_sums.expert_sums`; writes into ``out_RH``."""
    assert x_PH.is_contiguous() and pair_RK.is_contiguous() and out_RH.is_contiguous()
    rows, width = out_RH.shape
    if out_RH.numel():
        block = min(_BLOCK, triton.next_power_of_2(width))
        _expert_sums[(rows, triton.cdiv(width, block))](
            x_PH, pair_RK, out_RH, len(x_PH), width, K=pair_RK.shape[1], BLOCK=block, num_warps=4
        )


@triton.jit
def _expert_sums(x, pair, out, count, width, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for expert in tl.static_range(K):
        number = tl.load(pair + row * K + expert)
        total += tl.load(x + number * width + column, mask=inside & (number < count), other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)
