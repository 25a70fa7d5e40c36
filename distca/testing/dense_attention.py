"""Kinds of core attention in the most direct way, as a kernel: a score matrix per task, differentiated by autograd."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from distca.attention.kernel import TaskBatch


@dataclass
class DenseKernel:
    """Computes any dtype on any device.

    Attributes:
        window: keys that a query sees, its own position's included; None are all.
        softcap: scores s become softcap · tanh(s / softcap); None leaves them.
        sink_H: [heads] logit of each head that takes part in the softmax and has no value; None has none.
    """

    window: int | None = None
    softcap: float | None = None
    sink_H: torch.Tensor | None = None
    name: str = "dense"

    def forward(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, batch: TaskBatch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`distca.attention.Kernel`."""
        outputs, sums = [], []
        for (begin, end), (first, last) in zip(pairwise(batch.borders_q), pairwise(batch.borders_kv), strict=True):
            q, k, v = q_THD[begin:end], k_SGD[first:last], v_SGD[first:last]
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            scores_HQK = torch.einsum("qhd,khd->hqk", q, k) * scale
            if self.softcap is not None:
                scores_HQK = self.softcap * torch.tanh(scores_HQK / self.softcap)
            scores_HQK = scores_HQK.masked_fill(self._hidden(scores_HQK, batch.causal), float("-inf"))
            lse_HQ = scores_HQK.logsumexp(-1)
            if self.sink_H is not None:
                lse_HQ = torch.logaddexp(lse_HQ, self.sink_H.to(lse_HQ.dtype)[:, None])
            outputs.append(torch.einsum("hqk,khd->qhd", (scores_HQK - lse_HQ[..., None]).exp(), v))
            sums.append(lse_HQ.t())
        return torch.cat(outputs), torch.cat(sums)

    def backward(
        self,
        do_THD: torch.Tensor,
        q_THD: torch.Tensor,
        k_SGD: torch.Tensor,
        v_SGD: torch.Tensor,
        o_THD: torch.Tensor,
        lse_TH: torch.Tensor,
        batch: TaskBatch,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :class:`distca.attention.Kernel`; o and log-sum-exp are computed again."""
        q, k, v = (x.detach().requires_grad_() for x in (q_THD, k_SGD, v_SGD))
        with torch.enable_grad():
            o, _ = self.forward(q, k, v, batch, scale)
        dq, dk, dv = torch.autograd.grad(o, (q, k, v), do_THD)
        return dq, dk, dv

    def _hidden(self, scores_HQK: torch.Tensor, causal: bool) -> torch.Tensor:
        queries, keys = scores_HQK.shape[1:]
        key_K = torch.arange(keys, device=scores_HQK.device)
        position_Q1 = torch.arange(keys - queries, keys, device=scores_HQK.device)[:, None]
        hidden_QK = (key_K > position_Q1) if causal else torch.zeros_like(key_K > position_Q1)
        return hidden_QK if self.window is None else hidden_QK | (key_K <= position_Q1 - self.window)
