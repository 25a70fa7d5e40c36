"""The interface of core-attention kernels: a fused batch of CA-tasks in, o and log-sum-exp out, and its backward.

Shape suffixes: T query rows and S key/value rows of the batch; H query heads, G key/value heads (H is a multiple of G),
D head dimension. Values, and with them o and dO, may be narrower than queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from distca.attention.sink import sink_gradient, with_sink
from distca.device.host_to_device import Destination, to_device
from distca.plan.kinds import AttentionKind


@dataclass(frozen=True)
class TaskBatch:
    """The borders of a fused batch of CA-tasks.

    Task i has query rows cu_q[i]:cu_q[i+1] and key/value rows cu_kv[i]:cu_kv[i+1]. Its last query row sees all of its
    key/value rows, the row before one less, and so on (causal, aligned at the end). Every task has at least one query
    row, and at least as many key/value rows as query rows. A kind of layer with a window hides those that lie further
    back from each query.

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
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, batch: TaskBatch, kind: AttentionKind
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return o_THD in q's dtype and lse_TH, the natural-log sum of exponentials of the scores (float32; float64 for
        float64 inputs). Sinks are no matter of kernels: they are added to what these return (``sink.py``)."""
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
        kind: AttentionKind,
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
    kind: AttentionKind,
    timer: Timer | None = None,
    sink_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """o_THD of a fused batch of CA-tasks (not empty), differentiable with respect to q, k, v and the sinks.

    ``timer("forward")`` and ``timer("backward")`` give contexts in which the kernel runs.
    """
    return _CoreAttention.apply(q_THD, k_SGD, v_SGD, sink_H, batch, kernel, kind, timer or (lambda _: nullcontext()))


class _CoreAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        batch: Any,
        kernel: Any,
        kind: Any,
        timer: Timer,
    ) -> torch.Tensor:
        with timer("forward"):
            o, lse = kernel.forward(q, k, v, batch, kind)
            if sink is not None:
                o, lse = with_sink(o, lse, sink)
        ctx.save_for_backward(q, k, v, o, lse, sink)
        ctx.rest = (batch, kernel, kind, timer)
        return o

    @staticmethod
    def backward(ctx: Any, *do: torch.Tensor) -> Any:
        batch, kernel, kind, timer = ctx.rest
        q, k, v, o, lse, sink = ctx.saved_tensors
        with timer("backward"):
            gradients = kernel.backward(do[0].contiguous(), q, k, v, o, lse, batch, kind)
            of_sink = None if sink is None else sink_gradient(do[0], o, lse, sink)
        return (*gradients, of_sink, None, None, None, None)
