"""All ranks must plan alike, each on its own: otherwise one waits for rows that nobody sends."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from distca.cluster.health import TIMEOUT
from distca.errors import PlanError


class Agreement:
    """Compares what ranks planned, step by step. All ranks create it together.

    It has process groups of its own, so that the thread that plans can ask while the step before runs.

    Attributes:
        next_step: number of the step that is planned next.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.next_step = 1

    def check(self, fingerprint: int) -> None:
        """Refuse a step that this rank or another planned differently; every rank calls it for every step.

        Args:
            fingerprint: of what this rank planned, as :func:`distca.plan.plan.fingerprint` gives it.

        Raises:
            PlanError: on every rank, naming those that differ from rank 0.
        """
        step, self.next_step = self.next_step, self.next_step + 1
        everyone = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(everyone, torch.tensor(fingerprint, dtype=torch.int64), group=self._group)
        others = np.flatnonzero([int(each) != int(everyone[0]) for each in everyone])
        if len(others):
            some = ", ".join(map(str, others[:8])) + (", …" if len(others) > 8 else "")
            raise PlanError(
                f"{len(others)} of {len(everyone)} ranks ({some}) planned step {step} differently from rank 0, "
                "so nothing of it was sent. They were started with other settings, have other versions of distca or "
                "numpy, or another kind of processor: compare their settings and `distca doctor` on their nodes."
            )
