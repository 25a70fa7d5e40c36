"""A right kernel that rounds where kernels on GPUs do: probabilities and their gradients before their products."""

import torch

from distca.attention.kernel import TaskBatch
from distca.attention.reference import _blocks, _by_group, _heads_first, _matmul, _scores, _ungroup
from distca.plan.kinds import AttentionKind


class RoundedKernel:
    """As the reference, with online softmax's unnormalised probabilities."""

    name = "rounded"

    def forward(self, q, k, v, batch: TaskBatch, kind: AttentionKind):
        lse = torch.empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        o = q.new_empty(*q.shape[:2], v.shape[2])
        for rows, keys, first in _blocks(batch, kind.window):
            scores = _scores(_by_group(q[rows], k.shape[1]), _heads_first(k[keys]), first, kind)
            most = scores.amax(-1, keepdim=True)
            p = torch.exp(scores - most)
            total = p.sum(-1, keepdim=True)
            o[rows] = _ungroup(_matmul(_rounded(p, q.dtype), _heads_first(v[keys])) / total).to(q.dtype)
            lse[rows] = (most + total.log())[..., 0].flatten(0, 1).t()
        return o, lse

    def backward(self, do, q, k, v, o, lse, batch: TaskBatch, kind: AttentionKind):
        groups, dq = k.shape[1], torch.empty_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (k, v))
        for rows, keys, first in _blocks(batch, kind.window):
            q_rows, do_rows = (_by_group(x[rows], groups) for x in (q, do))
            k_rows, v_rows = (_heads_first(x[keys]) for x in (k, v))
            scores = _scores(q_rows, k_rows, first, kind)
            p = torch.exp(scores - lse[rows].t().unflatten(0, (groups, -1))[..., None])
            delta = (do_rows * _by_group(o[rows], groups)).sum(-1, keepdim=True)
            slope = 1 - (scores.masked_fill(p == 0, 0) / kind.softcap) ** 2 if kind.softcap else 1
            ds = _rounded(p * slope * (_matmul(do_rows, v_rows.transpose(1, 2)) - delta), q.dtype)
            dq[rows] = _ungroup(_matmul(ds, k_rows) * kind.scale).to(q.dtype)
            dk[keys] += torch.einsum("grbc,grbd->cgd", ds, q_rows) * kind.scale
            dv[keys] += torch.einsum("grbc,grbd->cgd", _rounded(p, q.dtype), do_rows)
        return dq, dk.to(k.dtype), dv.to(v.dtype)


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).to(x.dtype)
