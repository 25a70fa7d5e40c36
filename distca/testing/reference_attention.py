"""Packed causal attention in the most direct way: one score matrix per document, differentiated by autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from distca.plan import AttentionKind


def packed_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    lengths: Sequence[int],
    kind: AttentionKind | None = None,
    sink_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention inside each of the packed documents. A sink is one more column of scores, without a value.

    Args:
        q_THD: [tokens, heads, head_dim] in any floating dtype; computed in that dtype.
        k_TGD: [tokens, kv_heads, head_dim].
        v_TGD: [tokens, kv_heads, value_dim], of which o has the width.
        lengths: tokens per document, in packed order; their sum is the number of tokens.
        kind: of the layer; without a window, and scores times 1/sqrt(head_dim), if not given.
        sink_H: [heads] the sinks of a kind that has some.

    Returns:
        o_THD, differentiable with respect to q, k, v and the sinks.
    """
    repeats = q_THD.shape[1] // k_TGD.shape[1]
    kind = kind or AttentionKind(q_THD.shape[2] ** -0.5)
    outputs = []
    for q, k, v in zip(*(x.split(list(lengths)) for x in (q_THD, k_TGD, v_TGD)), strict=True):
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * kind.scale
        if kind.softcap:
            scores = kind.softcap * torch.tanh(scores / kind.softcap)
        everything = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
        mask = everything.triu(1)
        if kind.window:
            mask = mask | everything.tril(-kind.window)
        scores = scores.masked_fill(mask, float("-inf"))
        if sink_H is not None:
            scores = torch.cat((scores, sink_H[:, None, None].expand(-1, len(q), 1)), dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v))
    return torch.cat(outputs) if outputs else q_THD * 0


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in float64; 0 when both are zero, infinite where either is no finite number."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    difference, norm = (actual - expected).norm().item(), expected.norm().item()
    if not (math.isfinite(difference) and math.isfinite(norm)):
        return math.inf
    return difference / norm if norm else (0.0 if difference == 0 else math.inf)
