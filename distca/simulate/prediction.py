"""The prediction of a simulated step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.simulate.streams import Span


@dataclass(frozen=True)
class Prediction:
    """The prediction of one step in one mode, which is DistCA or a baseline.

    Array legend: R servers over all pipeline stages. A server stands for the tensor-parallel ranks that share its rows;
    they all do the same, so one of them is simulated.

    Attributes:
        mode: name of the mode.
        step_s: seconds of the step.
        tokens: tokens of the global batch.
        busy_s: [R] seconds in which the server computed.
        attention_s: [R] those of these seconds that were core attention.
        exposed_s: [R] seconds in which the server waited for bytes that were on the links.
        reduction_s: seconds of reducing gradients and gathering weights beside which nothing was computed.
        sent_bytes: [R] bytes that the server sent for cores of layers, and from stage to stage.
        memory_bytes: [R] bytes of memory at the peak.
        spans: the actions of the watched servers, with their times.
    """

    mode: str
    step_s: float
    tokens: int
    busy_s: np.ndarray
    attention_s: np.ndarray
    exposed_s: np.ndarray
    reduction_s: float
    sent_bytes: np.ndarray
    memory_bytes: np.ndarray
    spans: list[Span]

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all GPUs together."""
        return self.tokens / self.step_s

    @property
    def idle_share(self) -> float:
        """The share of the step in which a server computes nothing, in the mean over servers."""
        return 1 - float(self.busy_s.mean()) / self.step_s

    @property
    def exposed_share(self) -> float:
        """The share of the step in which a server waits for bytes of rows, gradients or weights, in the mean."""
        return (float(self.exposed_s.mean()) + self.reduction_s) / self.step_s

    @property
    def bubble_share(self) -> float:
        """The share of the step in which a server waits for other servers, in the mean.

        Causes are imbalance and, with pipeline stages, warm-up and drain."""
        return max(self.idle_share - self.exposed_share, 0.0)

    @property
    def attention_imbalance(self) -> float:
        """The most seconds of core attention on a server over the mean."""
        mean = float(self.attention_s.mean())
        return float(self.attention_s.max()) / mean if mean > 0 else 1.0
