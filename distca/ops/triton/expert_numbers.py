"""Triton kernel that lists the numbers of each row's experts."""

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096
"""Elements of the table that a program holds. It has as many whole rows as fit, and at least one."""


def expert_numbers(chosen_NE: torch.Tensor, topk: int) -> torch.Tensor:
    """Does what :func:`distca.ops.expert_numbers.expert_numbers` says."""
    assert chosen_NE.is_contiguous()
    rows, experts = chosen_NE.shape
    number_NK = torch.empty(rows, topk, dtype=torch.int32, device=chosen_NE.device)
    width = triton.next_power_of_2(experts)
    most = max(1, _ELEMENTS // width)
    if rows:
        _list[(triton.cdiv(rows, most),)](
            chosen_NE.view(torch.uint8), number_NK, rows, experts, topk, ROWS=most, WIDTH=width, num_warps=4
        )
    return number_NK


@triton.jit
def _list(chosen, number, rows, experts, topk, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    expert = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (expert < experts)
    is_chosen = tl.load(chosen + row * experts + expert, mask=inside, other=0).to(tl.int32)
    place = tl.cumsum(is_chosen, 1) - 1
    tl.store(number + row * topk + place, expert + tl.zeros_like(place), mask=(is_chosen > 0) & (place < topk))
