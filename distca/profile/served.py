"""Time attention servers: the very functions that a training step runs, on random rows.

A batch is described by the query rows and key/value rows of its CA-tasks; it becomes a real route of one rank.
Shape suffixes as in attention/kernel.py; k and v lie together as kv_S2GD.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from distca.attention import Kernel
from distca.plan import AttentionShape, Layout, Shards, plan_at_home, route
from distca.runtime.clock import Clock
from distca.runtime.device_routes import ServerRoute
from distca.runtime.server import serve_backward, serve_forward


@dataclass(frozen=True)
class Seconds:
    """Seconds of one server's batch."""

    forward: float
    backward: float


def median_seconds(work: Callable[[], object], clock: Clock, repeats: int) -> float:
    """Median seconds of ``work``. All repeats are queued before any is waited for, so that a GPU never idles between
    them as long as one takes longer than its launch."""
    spans = []
    for _ in range(repeats):
        start = clock.now()
        work()
        spans.append((start, clock.now()))
    return statistics.median(clock.seconds(start, end) for start, end in spans)


def route_of_tasks(q_rows: np.ndarray, kv_rows: np.ndarray, device: torch.device) -> ServerRoute:
    """The route of a lone server whose CA-tasks, each of its own document, have [N] ``q_rows`` and ``kv_rows``."""
    q_rows, kv_rows = np.asarray(q_rows, np.int64), np.asarray(kv_rows, np.int64)
    document, home = np.arange(len(q_rows)), np.zeros(len(q_rows), np.int64)
    first = kv_rows - q_rows
    carried, own = int(first.sum()), int(q_rows.sum())
    # Rows before a task's queries are carried over, as in a second nano-batch; row numbers there are of no matter.
    q = Shards(document, first, kv_rows, home, np.cumsum(q_rows) - q_rows)
    kv = Shards(document, np.zeros_like(first), kv_rows, home, np.cumsum(kv_rows) - kv_rows)
    layout = Layout(1, first, kv_rows, q, kv, np.array([own]), np.array([carried]))
    return ServerRoute.of(route(plan_at_home(layout), 0), device)


class TimedServer:
    """An attention server with random rows.

    Args:
        kernel: what computes.
        shape: heads of the attention layer.
        device: where; on a GPU its current stream is timed with events.
        dtype: of q, k, v, o and their gradients.
        q_rows: most query rows of a batch.
        kv_rows: most key/value rows of a batch.
    """

    def __init__(
        self,
        kernel: Kernel,
        shape: AttentionShape,
        device: torch.device,
        dtype: torch.dtype,
        *,
        q_rows: int,
        kv_rows: int,
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def rows(*size: int) -> torch.Tensor:
            return torch.empty(*size, device=device, dtype=dtype).normal_(generator=generator)

        self.q_THD = rows(q_rows, shape.heads, shape.head_dim)
        self.do_THD = rows(q_rows, shape.heads, shape.head_dim)
        self.kv_S2GD = rows(kv_rows, 2, shape.kv_heads, shape.head_dim)
        self._kernel = kernel
        self._scale = shape.head_dim**-0.5
        self._clock = Clock(device)

    def seconds(self, server: ServerRoute, *, warm_up: int, repeats: int) -> Seconds:
        """Median seconds of the server's batch after ``warm_up`` runs of it."""
        q, do, kv = self.q_THD[: server.q_rows], self.do_THD[: server.q_rows], self.kv_S2GD[: server.kv_rows]

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            return serve_forward(self._kernel, server, q, kv, self._scale)

        def backward() -> tuple[torch.Tensor, torch.Tensor]:
            return serve_backward(self._kernel, server, do, q, kv, o, lse, self._scale)

        for _ in range(max(warm_up - 1, 0)):
            forward()
        o, lse = forward()
        took_forward = median_seconds(forward, self._clock, repeats)
        for _ in range(warm_up):
            backward()
        return Seconds(took_forward, median_seconds(backward, self._clock, repeats))
