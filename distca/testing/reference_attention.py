"""Packed causal attention in the most direct way: one score matrix per document, differentiated by autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def packed_attention(
    q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, lengths: Sequence[int], scale: float | None = None
) -> torch.Tensor:
    """Causal attention inside each of the packed documents.

    Args:
        q_THD: [tokens, heads, head_dim] in any floating dtype; computed in that dtype.
        k_TGD: [tokens, kv_heads, head_dim].
        v_TGD: [tokens, kv_heads, head_dim].
        lengths: tokens per document, in packed order; their sum is the number of tokens.
        scale: factor on the scores, 1/sqrt(head_dim) if not given.

    Returns:
        o_THD, differentiable with respect to q, k and v.
    """
    repeats = q_THD.shape[1] // k_TGD.shape[1]
    scale = q_THD.shape[2] ** -0.5 if scale is None else scale
    outputs = []
    for q, k, v in zip(*(x.split(list(lengths)) for x in (q_THD, k_TGD, v_TGD)), strict=True):
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        mask = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(mask, float("-inf")).softmax(-1), v))
    return torch.cat(outputs) if outputs else q_THD * 0


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in float64; 0 when both are zero, infinite where either is no finite number."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    difference, norm = (actual - expected).norm().item(), expected.norm().item()
    if not (math.isfinite(difference) and math.isfinite(norm)):
        return math.inf
    return difference / norm if norm else (0.0 if difference == 0 else math.inf)
