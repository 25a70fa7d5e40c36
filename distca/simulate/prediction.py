"""The prediction of a simulated step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.simulate.streams import Span


@dataclass(frozen=True)
class Prediction:
    """One step of one mode. Array legend: R servers, over all stages; a server is one tensor-parallel rank of each.

    Attributes:
        mode: its name.
        step_s: seconds.
        tokens: of the global batch.
        busy_s: [R] seconds in which a rank computed.
        attention_s: [R] of these, core attention.
        exposed_s: [R] seconds in which it waited for bytes under way.
        reduction_s: seconds of reducing gradients and gathering weights that nothing hides.
        sent_bytes: [R] for core attention.
        memory_bytes: [R] at the peak.
        spans: what the watched ranks did when.
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
        """The speed of all GPUs together."""
        return self.tokens / self.step_s

    @property
    def idle_share(self) -> float:
        """Mean share of the step in which a rank computes nothing."""
        return 1 - float(self.busy_s.mean()) / self.step_s

    @property
    def exposed_share(self) -> float:
        """Mean share in which it waits for bytes: rows, and gradients and weights."""
        return (float(self.exposed_s.mean()) + self.reduction_s) / self.step_s

    @property
    def bubble_share(self) -> float:
        """Mean share in which it waits for other ranks: imbalance and, with stages, warm-up and drain."""
        return max(self.idle_share - self.exposed_share, 0.0)

    @property
    def attention_imbalance(self) -> float:
        """Slowest rank's core attention over the mean."""
        mean = float(self.attention_s.mean())
        return float(self.attention_s.max()) / mean if mean > 0 else 1.0
