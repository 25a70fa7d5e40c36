"""The interface of core-attention kernels: a fused batch of CA-tasks in, o and log-sum-exp out, and its backward.

A *CA-task* (core-attention task) is a range of a document's queries with all keys and values up to them. Ranks compute
tasks for each other, and backward of a task may run on another rank than its forward. So kernels are plain functions,
not autograd functions. Implementations are flash4.py, torch_flash.py and reference.py; pair.py joins two of them.
:func:`core_attention` is an autograd function around a kernel, for attention that stays on its rank.

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
    key/value rows, the row before sees one less, and so on (causal, aligned at the end). Every task has at least one
    query row, and at least as many key/value rows as query rows. In layers with a window, each query only sees the
    last few of these rows.

    CA-tasks are always causal. A batch with ``causal`` False is for baselines such as ring attention, which merge
    partial results. There each query row sees all key/value rows of its task, and a task has at least one of these.

    Attributes:
        cu_q: [tasks + 1] int32 borders of query rows, on the kernel's device.
        cu_kv: [tasks + 1] int32 borders of key/value rows, on the kernel's device.
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
        """Makes a batch from int borders on the host, without blocking the host."""
        q_rows, kv_rows = np.diff(borders_q), np.diff(borders_kv)
        assert (q_rows > 0).all() and (kv_rows >= (q_rows if causal else 1)).all()
        borders_q, borders_kv = borders_q.astype(np.int32), borders_kv.astype(np.int32)
        return TaskBatch(
            to_device(borders_q, device),
            to_device(borders_kv, device),
            borders_q,
            borders_kv,
            int(q_rows.max(initial=0)),
            int(kv_rows.max(initial=0)),
            causal,
        )


class Kernel(Protocol):
    """A pair of functions without state over a fused batch of CA-tasks, which is never empty."""

    name: str

    def forward(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, batch: TaskBatch, kind: AttentionKind
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns o_THD in q's dtype, and lse_TH.

        lse is the natural logarithm of the sum of exponentials of a row's scores, in float32, for float64 inputs in
        float64. Kernels ignore the kind's sinks, which ``sink.py`` applies to their results."""
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
        """Returns dq_THD, dk_SGD and dv_SGD. Tasks never share a key/value row, so nothing is added up here."""
        ...


Timer = Callable[[str], AbstractContextManager[None]]
"""A function from "forward" or "backward" to a context that measures its block."""


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
    """Computes a fused batch of CA-tasks as an autograd function, for layers whose attention stays on its rank.

    Args:
        q_THD: queries.
        k_SGD: keys.
        v_SGD: values.
        batch: borders of the tasks; not empty.
        kernel: the kernel.
        kind: window, scale and softcap of the layer.
        timer: measures the kernel's runs; None measures nothing.
        sink_H: the layer's sinks, learned scores without a value that take a part of each softmax; None for none.

    Returns:
        o_THD, differentiable with respect to q, k, v and the sinks.
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
            do_THD = do[0].contiguous()
            gradients = kernel.backward(do_THD, q, k, v, o, lse, batch, kind)
            of_sink = None if sink is None else sink_gradient(do_THD, o, lse, sink)
        return (*gradients, of_sink, None, None, None, None)
