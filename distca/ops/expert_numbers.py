"""The numbers of each row's experts, from a table of which experts the row chose. N rows, E experts, K of each row."""

from __future__ import annotations

import torch

from distca.ops.triton import has_kernels


def expert_numbers(chosen_NE: torch.Tensor, topk: int) -> torch.Tensor:
    """Returns [N, K] int32 numbers of each row's experts, ascending, for example [[0, 2], [1, 3]] for 1010 and 0101.

    The host does not wait for the device, as it would in torch.nonzero.

    Args:
        chosen_NE: bool, contiguous, true for the K = ``topk`` experts of each row.
    """
    rows, experts = chosen_NE.shape
    if has_kernels(chosen_NE, "expert numbers"):
        from distca.ops.triton.expert_numbers import expert_numbers as kernel

        return kernel(chosen_NE, topk)
    device = chosen_NE.device
    # Experts that were not chosen are written to one more element at the end, which is cut off.
    place_NE = chosen_NE.cumsum(1) - 1 + torch.arange(rows, device=device)[:, None] * topk
    place = torch.where(chosen_NE, place_NE, rows * topk).flatten()
    number = torch.arange(experts, dtype=torch.int32, device=device).expand(rows, -1).flatten()
    return (
        torch.empty(rows * topk + 1, dtype=torch.int32, device=device).scatter_(0, place, number)[:-1].view(rows, topk)
    )
