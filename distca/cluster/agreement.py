"""All ranks must plan alike, each on its own: otherwise one waits for rows that nobody sends."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from distca.cluster.timeout import TIMEOUT
from distca.errors import DistcaError, PlanError

T = TypeVar("T")

_PLANNED, _ENDED, _FAILED = range(3)
_FIRST_WORD_S = 3.0
"""In which ranks leave the word to the one that could not plan: it knows the trace."""


@dataclass(frozen=True)
class Fingerprint:
    """Numbers that two ranks have alike if they made the same of the same.

    Attributes:
        plan: of a plan, as :func:`distca.plan.plan.fingerprint` gives it.
        documents: of what the plan's documents contain.
    """

    plan: int
    documents: int = 0


_NOTHING = Fingerprint(0)


class Agreement:
    """Compares what ranks planned, step by step. All ranks create it together.

    It has process groups of its own, so that the thread that plans can ask while the step before runs. Ranks may plan
    several loops of steps by turns, all in the same order: one thread of each rank plans them all.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._loops = 0

    def on(self, steps: Iterable[T], fingerprint: Callable[[T], Fingerprint], first: int = 1) -> Iterator[T]:
        """The steps, of which each is handed on once all ranks have planned it alike; every rank calls it.

        Args:
            steps: each is planned when it is asked for.
            fingerprint: of what was planned.
            first: number of the first one, for messages; the same on every rank.

        Raises:
            PlanError: on every rank, if one planned otherwise, has fewer steps or is in another loop, and if another
                one could not plan. The one that could not raises what it met.
        """
        self._loops += 1
        return self._compared(iter(steps), fingerprint, self._loops, first)

    def _compared(
        self, planning: Iterator[T], fingerprint: Callable[[T], Fingerprint], loop: int, first: int
    ) -> Iterator[T]:
        for number in count(first):
            try:
                step = next(planning, None)
                found = None if step is None else fingerprint(step)
            except Exception as error:
                self._compare(_FAILED, loop, number, failure=error)
                raise
            if step is None or found is None:
                self._compare(_ENDED, loop, number)
                return
            self._compare(_PLANNED, loop, number, found)
            yield step

    def _compare(
        self,
        state: int,
        loop: int,
        number: int,
        found: Fingerprint = _NOTHING,
        failure: Exception | None = None,
    ) -> None:
        mine = torch.tensor([state, loop, number, found.plan, found.documents], dtype=torch.int64)
        everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(everyone, mine, group=self._group)
        states, loops, numbers, plans, documents = torch.stack(everyone).T.tolist()
        if _FAILED in states:
            failed = states.index(_FAILED)
            self._tell_failure(numbers[failed], failed, failure)
        elif (others := _unlike_first(list(zip(loops, numbers, strict=True)))) is not None:
            raise PlanError(
                f"{others} planned another step than rank 0: ranks left a loop of CAD.plan_ahead after different "
                "steps, began with different ones, or called CAD.plan_step more often. End the run, and let every "
                "rank plan the same."
            )
        elif len(set(states)) > 1:
            raise PlanError(f"{_who(states, _ENDED)} ended before step {number}, which the others planned.")
        elif (others := _unlike_first(plans)) is not None:
            raise PlanError(
                f"{others} planned step {number} differently from rank 0, so nothing of it was sent. They have "
                "documents of other lengths, other settings, other versions of distca or numpy, or another kind of "
                "processor: give every rank the documents of all ranks, and compare settings and `distca doctor` on "
                "their nodes."
            )
        elif (others := _unlike_first(documents)) is not None:
            raise PlanError(
                f"{others} gave other documents to step {number} than rank 0, of the same lengths: their token ids or "
                "weights differ. Give every rank the documents of all ranks; each one reads its own rows of them."
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


def _unlike_first(values: Sequence[Any]) -> str | None:
    """Returns, in words, the ranks that have another value than the first one; None if all have the same."""
    if len(set(values)) == 1:
        return None
    return _who([each != values[0] for each in values], True)


def _who(values: list[int] | list[bool], which: int) -> str:
    ranks = np.flatnonzero([value == which for value in values])
    some = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"{len(ranks)} of {len(values)} ranks ({some})"
