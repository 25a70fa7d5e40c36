"""A kernel as one differentiable function, for attention that stays on its rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from distca.attention.kernel import Kernel, TaskBatch

Timer = Callable[[str], AbstractContextManager[None]]


def core_attention(
    q_THD: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGD: torch.Tensor,
    batch: TaskBatch,
    kernel: Kernel,
    scale: float,
    timer: Timer | None = None,
) -> torch.Tensor:
    """o_THD of a fused batch of CA-tasks (not empty), differentiable with respect to q, k and v.

    ``timer("forward")`` and ``timer("backward")`` give contexts in which the kernel runs.
    """
    return _CoreAttention.apply(q_THD, k_SGD, v_SGD, batch, kernel, scale, timer or (lambda _: nullcontext()))


class _CoreAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any, kernel: Any, scale: Any, timer: Timer
    ) -> torch.Tensor:
        with timer("forward"):
            o, lse = kernel.forward(q, k, v, batch, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.rest = (batch, kernel, scale, timer)
        return o

    @staticmethod
    def backward(ctx: Any, *do: torch.Tensor) -> Any:
        batch, kernel, scale, timer = ctx.rest
        q, k, v, o, lse = ctx.saved_tensors
        with timer("backward"):
            gradients = kernel.backward(do[0].contiguous(), q, k, v, o, lse, batch, scale)
        return (*gradients, None, None, None, None)
