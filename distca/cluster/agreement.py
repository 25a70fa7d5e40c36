"""All ranks must plan alike, each on its own: otherwise one waits for rows that nobody sends."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from distca.cluster.health import TIMEOUT
from distca.errors import DistcaError, PlanError

T = TypeVar("T")

_PLANNED, _ENDED, _FAILED = range(3)
_FIRST_WORD_S = 3.0
"""In which ranks leave the word to the one that could not plan: it knows the trace."""


class Agreement:
    """Compares what ranks planned, step by step. All ranks create it together.

    It has process groups of its own, so that the thread that plans can ask while the step before runs.

    Attributes:
        next_step: number of the step that is planned next.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.next_step = 1

    def on(self, steps: Iterable[T], fingerprint: Callable[[T], int]) -> Iterator[T]:
        """The steps, of which each is handed on once all ranks have planned it alike; every rank calls it.

        Args:
            steps: each is planned when it is asked for.
            fingerprint: of what was planned, as :func:`distca.plan.plan.fingerprint` gives it.

        Raises:
            PlanError: on every rank, if one planned otherwise or has fewer steps, and if another one could not plan.
                The one that could not raises what it met.
        """
        planning = iter(steps)
        while True:
            try:
                step = next(planning, None)
            except Exception as error:
                self._compare(_FAILED, failure=error)
                raise
            if step is None:
                self._compare(_ENDED)
                return
            self._compare(_PLANNED, fingerprint(step))
            yield step

    def _compare(self, state: int, fingerprint: int = 0, failure: Exception | None = None) -> None:
        number, self.next_step = self.next_step, self.next_step + 1
        mine = torch.tensor([state, fingerprint], dtype=torch.int64)
        everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(everyone, mine, group=self._group)
        states, fingerprints = torch.stack(everyone).T.tolist()
        if _FAILED in states:
            self._tell_failure(number, states.index(_FAILED), failure)
        elif len(set(states)) > 1:
            raise PlanError(f"{_who(states, _ENDED)} ended before step {number}, which the others planned.")
        elif len(set(fingerprints)) > 1:
            raise PlanError(
                f"{_who([each != fingerprints[0] for each in fingerprints], True)} planned step {number} differently "
                "from rank 0, so nothing of it was sent. They were started with other settings, have other versions of "
                "distca or numpy, or another kind of processor: compare their settings and `distca doctor` on their "
                "nodes."
            )

    def _tell_failure(self, number: int, rank: int, failure: Exception | None) -> None:
        """Raise on the ranks that could plan what another one could not."""
        said = str(failure)
        if failure is not None and not isinstance(failure, DistcaError):
            said = traceback.format_exception_only(failure)[-1].strip()
        everyone = [said] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, said, group=self._group)
        if failure is None:
            time.sleep(_FIRST_WORD_S)
            raise PlanError(f"Rank {rank} could not plan step {number}: {everyone[rank]}")


def _who(values: list[int] | list[bool], which: int) -> str:
    ranks = np.flatnonzero([value == which for value in values])
    some = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"{len(ranks)} of {len(values)} ranks ({some})"
