"""Kernels that are wrong on purpose, each in the way a real one was or could be, around a right one."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from distca.attention.kernel import Kernel, TaskBatch
from distca.plan.kinds import AttentionKind

_TILE = 128

Forward = tuple[torch.Tensor, torch.Tensor]
Backward = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class WrongKernel:
    """A right kernel, and what is done to its outcome."""

    def __init__(
        self,
        right: Kernel,
        forward: Callable[[Forward], Forward] = lambda out: out,
        backward: Callable[[Backward, TaskBatch], Backward] = lambda out, _: out,
    ) -> None:
        self.name, self._right, self._forward, self._backward = right.name, right, forward, backward

    def forward(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, batch: TaskBatch, kind: AttentionKind
    ) -> Forward:
        return self._forward(self._right.forward(q_THD, k_SGD, v_SGD, batch, kind))

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
    ) -> Backward:
        out = self._right.backward(do_THD, q_THD, k_SGD, v_SGD, o_THD, lse_TH, batch, kind)
        return self._backward(out, batch)


class DiagonalOffByOne:
    """Query rows see one key less where they are fewer than their keys; the last key is never read.

    Args:
        right: the kernel.
        forward: whether forward is wrong, too, and not backward alone.
    """

    def __init__(self, right: Kernel, forward: bool = True) -> None:
        self.name, self._right, self._in_forward = right.name, right, forward

    def forward(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, batch: TaskBatch, kind: AttentionKind
    ) -> Forward:
        if not self._in_forward:
            return self._right.forward(q_THD, k_SGD, v_SGD, batch, kind)
        shorter, kept = _without_last_keys(batch)
        return self._right.forward(q_THD, k_SGD[kept], v_SGD[kept], shorter, kind)

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
    ) -> Backward:
        shorter, kept = _without_last_keys(batch)
        dq, dk, dv = self._right.backward(do_THD, q_THD, k_SGD[kept], v_SGD[kept], o_THD, lse_TH, shorter, kind)
        dk_SGD, dv_SGD = torch.zeros_like(k_SGD), torch.zeros_like(v_SGD)
        dk_SGD[kept], dv_SGD[kept] = dk, dv
        return dq, dk_SGD, dv_SGD


class OtherKind:
    """Computes another kind than it is asked for, such as a window of one key more."""

    def __init__(self, right: Kernel, kind: AttentionKind) -> None:
        self.name, self._right, self._kind = right.name, right, kind

    def forward(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, batch: TaskBatch, kind: AttentionKind
    ) -> Forward:
        return self._right.forward(q_THD, k_SGD, v_SGD, batch, self._kind)

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
    ) -> Backward:
        return self._right.backward(do_THD, q_THD, k_SGD, v_SGD, o_THD, lse_TH, batch, self._kind)


def wrong_kernels(right: Kernel) -> dict[str, Kernel]:
    """Wrong kernels around a right one, by what is wrong with them."""
    return {
        "dV x 1.05": WrongKernel(right, backward=lambda out, _: (out[0], out[1], out[2] * 1.05)),
        "dQ without the scale": WrongKernel(
            right, backward=lambda out, _: (out[0] * out[0].shape[-1] ** 0.5, *out[1:])
        ),
        "log-sum-exp in base 2": WrongKernel(right, forward=lambda out: (out[0], out[1] / math.log(2))),
        "last tile of dK zero": WrongKernel(right, backward=_last_tile_zero),
        "diagonal off by one": DiagonalOffByOne(right),
        "diagonal off by one in backward": DiagonalOffByOne(right, forward=False),
        "one head's dV is another's": WrongKernel(right, backward=_first_head_twice),
    }


def _last_tile_zero(out: Backward, batch: TaskBatch) -> Backward:
    """The last tile of the task with most keys, as if a loop ended one tile early."""
    dq, dk, dv = out
    begin, end = max(zip(batch.borders_kv, batch.borders_kv[1:], strict=False), key=lambda task: task[1] - task[0])
    dk = dk.clone()
    dk[begin + (end - begin - 1) // _TILE * _TILE : end] = 0
    return dq, dk, dv


def _first_head_twice(out: Backward, _: TaskBatch) -> Backward:
    dq, dk, dv = out
    if dv.shape[1] == 1:
        return dq, dk, dv.flip(-1)
    dv = dv.clone()
    dv[:, -1] = dv[:, 0]
    return dq, dk, dv


def _without_last_keys(batch: TaskBatch) -> tuple[TaskBatch, torch.Tensor]:
    """The batch without the last key of each task that has more keys than queries, and the rows that are left."""
    rows, keys = np.diff(batch.borders_q), np.diff(batch.borders_kv)
    fewer = keys - (keys > rows)
    kept = np.concatenate([begin + np.arange(n) for begin, n in zip(batch.borders_kv, fewer, strict=False)])
    borders = np.concatenate(([0], np.cumsum(fewer))).astype(np.int32)
    device = batch.cu_q.device
    shorter = TaskBatch.of(batch.borders_q, borders, device, causal=batch.causal)
    return shorter, torch.from_numpy(kept).to(device)
