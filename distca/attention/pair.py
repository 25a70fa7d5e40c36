"""A kernel made of two: forward runs by one, backward by another.

It is for heads, devices and options for which a fast kernel is right in one direction alone. The two meet in o and lse
only, whose meaning :class:`distca.attention.kernel.Kernel` fixes.
"""

from __future__ import annotations

import torch

from distca.attention.kernel import Kernel, TaskBatch
from distca.plan.kinds import AttentionKind

BETWEEN = "+"
"""The sign between the names of the two kernels, forward first: ``flash4+torch``."""


class PairKernel:
    """The forward of one kernel and the backward of another.

    Args:
        forward: the kernel whose forward runs.
        backward: the kernel whose backward runs.
    """

    def __init__(self, forward: Kernel, backward: Kernel) -> None:
        self.name = f"{forward.name}{BETWEEN}{backward.name}"
        self._forward, self._backward = forward, backward

    def forward(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, batch: TaskBatch, kind: AttentionKind
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._forward.forward(q_THD, k_SGD, v_SGD, batch, kind)

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
        return self._backward.backward(do_THD, q_THD, k_SGD, v_SGD, o_THD, lse_TH, batch, kind)
