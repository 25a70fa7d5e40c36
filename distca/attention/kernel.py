"""What a core-attention kernel is: a fused batch of CA-tasks in, o and log-sum-exp out, and its backward.

Shape suffixes: T query rows of the batch, S key/value rows of the batch, H query heads, G key/value heads (H is a
multiple of G), D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from distca.device.host_to_device import Destination, to_device


@dataclass(frozen=True)
class TaskBatch:
    """The borders of a fused batch of CA-tasks.

    Task i has query rows cu_q[i]:cu_q[i+1] and key/value rows cu_kv[i]:cu_kv[i+1]. Its last query row sees all of its
    key/value rows, the row before one less, and so on (causal, aligned at the end). Every task has at least one query
    row, and at least as many key/value rows as query rows.

    CA-tasks are always causal. A batch that is not is a part of an attention that somebody merges with others, as ring
    attention does: each of its query rows sees all key/value rows of its task, of which there is at least one.

    Attributes:
        cu_q: [tasks + 1] int32 on the kernel's device.
        cu_kv: [tasks + 1] int32 on the kernel's device.
        borders_q: the same borders on the host, int32 numpy.
        borders_kv: the same borders on the host, int32 numpy.
        max_q: most query rows of a task.
        max_kv: most key/value rows of a task.
        causal: False where every query row sees all key/value rows of its task.
    """

    cu_q: torch.Tensor
    cu_kv: torch.Tensor
    borders_q: np.ndarray
    borders_kv: np.ndarray
    max_q: int
    max_kv: int
    causal: bool = True

    def __len__(self) -> int:
        return len(self.borders_q) - 1

    @staticmethod
    def of(borders_q: np.ndarray, borders_kv: np.ndarray, device: Destination, *, causal: bool = True) -> TaskBatch:
        """Build a batch from host borders; the copy to a GPU does not block the host."""
        q_rows, kv_rows = np.diff(borders_q), np.diff(borders_kv)
        assert (q_rows > 0).all() and (kv_rows >= (q_rows if causal else 1)).all()
        return TaskBatch(
            to_device(borders_q.astype(np.int32), device),
            to_device(borders_kv.astype(np.int32), device),
            borders_q,
            borders_kv,
            int(q_rows.max(initial=0)),
            int(kv_rows.max(initial=0)),
            causal,
        )


class Kernel(Protocol):
    """A stateless pair of functions over a fused batch of CA-tasks. The batch is never empty."""

    name: str

    def forward(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, batch: TaskBatch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return o_THD in q's dtype and lse_TH, the natural-log sum of exponentials of the scaled scores (float32;
        float64 for float64 inputs)."""
        ...

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
        """Return dq_THD, dk_SGD and dv_SGD. Key/value rows of two tasks are separate rows."""
        ...


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
