"""Time attention servers: the very functions that a training step runs, on random rows.

A batch is described by the query rows and key/value rows of its CA-tasks; it becomes a real route of one rank.

A GPU under load runs at the clock that its power limit allows. That depends on what it did in the last tenths of a
second: timed twice after a pause, the same forward batch differed by up to 14 %. So batches are timed in rounds: every
batch once, forward then backward, in another order each time and without a pause, as a training step would. On a CPU
seconds are those that the thread computed, as in training (``Clock.work``). Shape suffixes as in attention/kernel.py; k
and v lie together as kv_S2GD.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from distca.attention import Kernel
from distca.device.clock import Clock, Instant
from distca.plan import AttentionKind, AttentionShape, Layout, Shards, plan_at_home, route
from distca.runtime.device_routes import ServerRoute
from distca.runtime.server import compute_backward, compute_forward


class EndedEarlyError(Exception):
    """The user has ended a measurement; raised by what is called after each run."""


@dataclass(frozen=True)
class Samples:
    """Seconds of one server's batch. Array legend: N rounds.

    Attributes:
        forward: [N] float64.
        backward: [N] float64.
    """

    forward: np.ndarray
    backward: np.ndarray

    def median(self, direction: str) -> float:
        """Seconds in the middle round; ``direction`` is "forward" or "backward"."""
        return float(np.median(getattr(self, direction)))

    def noise(self, direction: str) -> float:
        """Standard deviation of a single round, as a part of the time; 0 for one round."""
        seconds = getattr(self, direction)
        return float(np.log(seconds).std(ddof=1)) if len(seconds) > 1 else 0.0


def median_seconds(work: Callable[[], object], clock: Clock, repeats: int) -> float:
    """Median seconds of ``work``. All repeats are queued before any is waited for. So a GPU never idles between them as
    long as one takes longer than its launch."""
    spans = []
    for _ in range(repeats):
        start = clock.now()
        work()
        spans.append((start, clock.now()))
    return statistics.median(clock.seconds(start, end) for start, end in spans)


def route_of_tasks(q_rows: np.ndarray, kv_rows: np.ndarray, kind: AttentionKind, device: torch.device) -> ServerRoute:
    """The route of a lone server whose CA-tasks, each of its own document, have [N] ``q_rows`` and ``kv_rows``."""
    q_rows, kv_rows = np.asarray(q_rows, np.int64), np.asarray(kv_rows, np.int64)
    document, home = np.arange(len(q_rows)), np.zeros(len(q_rows), np.int64)
    first = kv_rows - q_rows
    carried, own = int(first.sum()), int(q_rows.sum())
    # Rows before a task's queries are carried over, as in a second nano-batch; row numbers there are of no matter.
    q = Shards(document, first, kv_rows, home, np.cumsum(q_rows) - q_rows)
    kv = Shards(document, np.zeros_like(first), kv_rows, home, np.cumsum(kv_rows) - kv_rows)
    layout = Layout(1, first, kv_rows, q, kv, np.array([own]), np.array([carried]))
    plan = replace(plan_at_home(layout), windows=(kind.window,))
    return ServerRoute.of(route(plan, 0), [kind], device)


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

        values = shape.value_dim or shape.head_dim
        of_kv = (2, shape.kv_heads, values) if values == shape.head_dim else (shape.kv_heads, shape.head_dim + values)
        self.q_THD = rows(q_rows, shape.heads, shape.head_dim)
        self.do_THD = rows(q_rows, shape.heads, values)
        self.kv_S2GD = rows(kv_rows, *of_kv)
        self._kernel = kernel
        self._clock = Clock(device)

    def samples(
        self,
        servers: Sequence[ServerRoute],
        rounds: Sequence[int],
        *,
        warm_up_s: float,
        advance: Callable[[], None] = lambda: None,
    ) -> list[Samples]:
        """Time every server's batch in as many rounds as ``rounds`` says for it.

        Args:
            servers: the batches.
            rounds: how often each is timed, at least once.
            warm_up_s: seconds of running the first batch before anything is timed; it runs at least once, which
                compiles kernels.
            advance: called after every run. Where it raises :class:`EndedEarlyError`, rounds that are lacking are
                left out.

        Raises:
            EndedEarlyError: it ended before every batch was timed once.
        """
        generator = np.random.default_rng(0)
        took = 0.0
        while took <= 0.0 or took < warm_up_s:
            began, _, ended = self._run(servers[0])
            took += self._clock.seconds(began, ended)
        seconds: list[list[tuple[float, float]]] = [[] for _ in servers]
        for number in range(max(rounds)):
            due = generator.permutation([at for at, count in enumerate(rounds) if number < count])
            self._run(servers[due[0]])  # the first one of a round would be timed with its launch
            spans, over = [], None
            for at in due:
                spans.append(self._run(servers[at]))
                try:
                    advance()
                except EndedEarlyError as ended_early:
                    over = ended_early
                    break
            for at, (began, between, ended) in zip(due, spans, strict=False):
                seconds[at].append((self._clock.seconds(began, between), self._clock.seconds(between, ended)))
            if over is not None and not all(seconds):
                raise over
            if over is not None:
                break
        return [Samples(*np.array(each).T) for each in seconds]

    def _run(self, server: ServerRoute) -> tuple[Instant, Instant, Instant]:
        """Run a batch forward and backward; the moments before, between and after."""
        q, do, kv = self.q_THD[: server.q_rows], self.do_THD[: server.q_rows], self.kv_S2GD[: server.kv_rows]
        began = self._clock.work()
        o, lse = compute_forward(self._kernel, server, q, kv)
        between = self._clock.work()
        compute_backward(self._kernel, server, do, q, kv, o, lse)
        return began, between, self._clock.work()
