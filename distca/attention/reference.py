"""A core-attention kernel in plain torch, for any device, dtype and head dimension.

It runs on CPUs, and other kernels are compared with it in float64. Query rows are processed in blocks, so memory grows
only linearly with the keys. Backward follows FlashAttention (arXiv 2205.14135, algorithm 4): P = exp(S − lse),
dS = P ∘ (dP − Δ) with Δ = rowsum(dO ∘ O).

Shape suffixes: T query rows and S key/value rows of the batch of tasks; H query heads, G key/value heads, D head
dimension; B rows of one query block, C keys that the block sees, R = H / G query heads per key/value head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from distca.attention.kernel import TaskBatch
from distca.plan.kinds import AttentionKind

_BLOCK_ROWS = 256
"""Query rows of a block; more rows need more memory for their scores."""


class ReferenceKernel:
    """Block-wise softmax attention in plain torch."""

    name = "reference"

    def forward(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, batch: TaskBatch, kind: AttentionKind
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o_THD = q_THD.new_empty(*q_THD.shape[:2], v_SGD.shape[2])
        lse_TH = torch.empty(q_THD.shape[:2], dtype=_accumulate(q_THD.dtype), device=q_THD.device)
        groups = k_SGD.shape[1]
        for rows, keys, first in _blocks(batch, kind.window):
            q_GRBD = _by_group(q_THD[rows], groups)
            scores = _scores(q_GRBD, _heads_first(k_SGD[keys]), first, kind)
            lse_GRB = torch.logsumexp(scores, dim=-1)
            o_GRBD = _matmul(torch.exp(scores - lse_GRB[..., None]), _heads_first(v_SGD[keys]))
            o_THD[rows] = _ungroup(o_GRBD).to(o_THD.dtype)
            lse_TH[rows] = lse_GRB.flatten(0, 1).t()
        return o_THD, lse_TH

    def backward(
        self,
        do_THD: torch.Tensor,
        q_THD: torch.Tensor,
        k_SGD: torch.Tensor,
        v_SGD: torch.Tensor,
        o_THD: torch.Tensor,
        lse_TH: torch.Tensor,
        batch: TaskBatch,
        kind: AttentionKind,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        groups = k_SGD.shape[1]
        dq_THD = torch.empty_like(q_THD)
        accumulate = _accumulate(q_THD.dtype)
        dk_SGD = torch.zeros(k_SGD.shape, dtype=accumulate, device=k_SGD.device)
        dv_SGD = torch.zeros(v_SGD.shape, dtype=accumulate, device=v_SGD.device)
        for rows, keys, first in _blocks(batch, kind.window):
            q_GRBD, do_GRBD = _by_group(q_THD[rows], groups), _by_group(do_THD[rows], groups)
            k_GCD, v_GCD = _heads_first(k_SGD[keys]), _heads_first(v_SGD[keys])
            lse_GRB = lse_TH[rows].t().unflatten(0, (groups, -1))
            scores = _scores(q_GRBD, k_GCD, first, kind)
            p = torch.exp(scores - lse_GRB[..., None])
            delta_GRB = (do_GRBD * _by_group(o_THD[rows], groups)).sum(-1)
            ds = p * (_matmul(do_GRBD, v_GCD.transpose(1, 2)) - delta_GRB[..., None]) * kind.scale
            if kind.softcap:
                ds = ds * (1 - (scores.masked_fill(p == 0, 0.0) / kind.softcap) ** 2)
            dq_THD[rows] = _ungroup(_matmul(ds, k_GCD)).to(dq_THD.dtype)
            dk_SGD[keys] += torch.einsum("grbc,grbd->cgd", ds, q_GRBD)
            dv_SGD[keys] += torch.einsum("grbc,grbd->cgd", p, do_GRBD)
        return dq_THD, dk_SGD.to(k_SGD.dtype), dv_SGD.to(v_SGD.dtype)


def _accumulate(dtype: torch.dtype) -> torch.dtype:
    """The dtype of all computation."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _blocks(batch: TaskBatch, window: int) -> Iterator[tuple[slice, slice, int]]:
    """Yields for every block its query rows, the key rows that it sees, and the index of its first query's own key.

    The index counts from the first of these key rows. In a batch that is not causal it is the number of keys, so that
    no key lies behind a query.
    """
    # "offset" is the number of a task's keys before its first query's own key, "own" that before the block's first one.
    borders_q, borders_kv = batch.borders_q.tolist(), batch.borders_kv.tolist()
    assert batch.causal or not window
    for task in range(len(batch)):
        begin, end, context = borders_q[task], borders_q[task + 1], borders_kv[task]
        offset = borders_kv[task + 1] - context - (end - begin)
        for row in range(begin, end, _BLOCK_ROWS):
            stop = min(row + _BLOCK_ROWS, end)
            own = offset + row - begin
            if batch.causal:
                skipped = max(own - window + 1, 0) if window else 0
                yield slice(row, stop), slice(context + skipped, context + offset + stop - begin), own - skipped
            else:
                yield slice(row, stop), slice(context, borders_kv[task + 1]), borders_kv[task + 1] - context


def _by_group(x_BHD: torch.Tensor, groups: int) -> torch.Tensor:
    """x_GRBD."""
    x = x_BHD.to(_accumulate(x_BHD.dtype))
    return x.transpose(0, 1).unflatten(0, (groups, -1))


def _ungroup(x_GRBD: torch.Tensor) -> torch.Tensor:
    """x_BHD."""
    return x_GRBD.flatten(0, 1).transpose(0, 1)


def _heads_first(x_CGD: torch.Tensor) -> torch.Tensor:
    """x_GCD."""
    return x_CGD.to(_accumulate(x_CGD.dtype)).transpose(0, 1)


def _matmul(x_GRBX: torch.Tensor, y_GXY: torch.Tensor) -> torch.Tensor:
    """Multiplies the rows of all query heads of a group with the group's one matrix."""
    repeats, rows = x_GRBX.shape[1:3]
    return torch.bmm(x_GRBX.flatten(1, 2), y_GXY).unflatten(1, (repeats, rows))


def _scores(q_GRBD: torch.Tensor, k_GCD: torch.Tensor, first: int, kind: AttentionKind) -> torch.Tensor:
    """scores_GRBC, minus infinity for hidden keys; ``first`` is the index of the first query's own key."""
    scores = _matmul(q_GRBD, k_GCD.transpose(1, 2)) * kind.scale
    if kind.softcap:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    rows, keys = scores.shape[-2:]
    everything = torch.ones(rows, keys, dtype=torch.bool, device=scores.device)
    hidden = everything.triu(first + 1)
    if kind.window:
        hidden |= everything.tril(first - kind.window)
    return scores.masked_fill_(hidden, float("-inf"))
