"""Attention sinks: each head has a learned score without a value, which takes a part of every query's softmax.

A kernel without sinks returns o and lse. With the sink s of the head

    lse' = log(exp(lse) + exp(s)),    o' = o · exp(lse - lse'),    ds = -Σ exp(s - lse') · (dO' · o')

and the gradients of q, k and v are what the same kernel's backward makes of dO', o' and lse': it knows the softmax by
lse alone, and rowsum(dO' ∘ o') is the same sum, to which the sink adds nothing.

Shape suffixes: T query rows, H query heads, D head dimension.
"""

from __future__ import annotations

import torch

from distca.ops.row_dots import row_dots


def with_sink(o_THD: torch.Tensor, lse_TH: torch.Tensor, sink_H: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """o'_THD in o's dtype and lse'_TH in lse's, with the sinks."""
    after_TH = torch.logaddexp(lse_TH, sink_H.to(lse_TH.dtype))
    return scaled(o_THD, torch.exp(lse_TH - after_TH)), after_TH


def scaled(o_THD: torch.Tensor, factor_TH: torch.Tensor) -> torch.Tensor:
    """o_THD times a factor for each row and head, rounded once to o's dtype."""
    return torch.mul(o_THD, factor_TH[..., None], out=torch.empty_like(o_THD))  # a GPU casts in the same pass


def sink_gradient(
    do_THD: torch.Tensor, o_THD: torch.Tensor, lse_TH: torch.Tensor, sink_H: torch.Tensor
) -> torch.Tensor:
    """ds_H in the sinks' dtype, from the outputs with sinks and their gradient."""
    weight_TH = torch.exp(sink_H.to(lse_TH.dtype) - lse_TH)
    return -(weight_TH * row_dots(do_THD, o_THD.contiguous())).sum(0).to(sink_H.dtype)
