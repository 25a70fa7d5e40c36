"""Attention sinks: each head has a learned score without a value, which takes a part of every query's softmax.

Kernels know no sinks and return o and lse, the log-sum-exp of a row's scores. The sink s of a head changes them to

    lse' = log(exp(lse) + exp(s)),    o' = o · exp(lse - lse'),    ds = -Σ exp(s - lse') · (dO' · o')

A kernel's backward gives the gradients of q, k and v if it gets dO', o' and lse'. It computes the softmax from lse',
and its sum rowsum(dO' ∘ o') needs no term of the sink, whose value is zero.

Shape suffixes: T query rows, H query heads, D head dimension.
"""

from __future__ import annotations

import torch

from distca.ops.row_sums import row_dots


def with_sink(o_THD: torch.Tensor, lse_TH: torch.Tensor, sink_H: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Applies the sinks; returns o'_THD in o's dtype and lse'_TH in lse's dtype."""
    after_TH = torch.logaddexp(lse_TH, sink_H.to(lse_TH.dtype))
    return scaled(o_THD, torch.exp(lse_TH - after_TH)), after_TH


def scaled(o_THD: torch.Tensor, factor_TH: torch.Tensor) -> torch.Tensor:
    """o_THD times a factor for each row and head, rounded once to o's dtype."""
    return torch.mul(o_THD, factor_TH[..., None], out=torch.empty_like(o_THD))  # one pass on GPUs, cast included


def sink_gradient(
    do_THD: torch.Tensor, o_THD: torch.Tensor, lse_TH: torch.Tensor, sink_H: torch.Tensor
) -> torch.Tensor:
    """ds_H in the sinks' dtype, from o' and lse' after sinks, and dO', the gradient of o', which is contiguous."""
    weight_TH = torch.exp(sink_H.to(lse_TH.dtype) - lse_TH)
    return -(weight_TH * row_dots(do_THD, o_THD.contiguous())).sum(0).to(sink_H.dtype)
