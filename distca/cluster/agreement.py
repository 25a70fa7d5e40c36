"""Lets ranks agree: on what each found by itself (its plan of a step, an objection), or on what the first one found.

Every rank plans each step by itself, without messages. If two plans differed, a rank would wait for rows that no rank
sends. So ranks compare checksums before a step runs.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from distca.cluster.timeout import TIMEOUT
from distca.errors import DistcaError, PlanError, SupportError

T = TypeVar("T")

_PLANNED, _ENDED, _FAILED = range(3)
_FIRST_WORD_S = 3.0
"""Seconds that other ranks wait before they report a rank's failure, as that rank reports it with its traceback."""


@dataclass(frozen=True)
class Fingerprint:
    """The checksums of a step, which are equal on two ranks with the same plan of the same documents.

    Attributes:
        plan: the checksum of the plan, from :func:`distca.plan.plan.fingerprint`.
        documents: the checksum of some token ids and of the weights of documents.
    """

    plan: int
    documents: int = 0


_NOTHING = Fingerprint(0)


class Agreement:
    """Compares ranks' plans, step by step; all ranks create it together.

    It has its own process group, so that the planning thread can use it while the previous step runs. Several loops of
    steps may alternate, in the same order on all ranks. One thread of each rank plans them all.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._loops = 0

    def on(self, steps: Iterable[T], fingerprint: Callable[[T], Fingerprint], first: int = 1) -> Iterator[T]:
        """Returns an iterator over the steps, which yields a step once all ranks have it; all ranks call it together.

        Args:
            steps: an iterable that plans a step at each ``next``.
            fingerprint: a function that returns the checksums of a step.
            first: number of the first step, for messages; the same on every rank.

        Raises:
            PlanError: plans or documents differ between ranks, a rank has fewer steps, or ranks are in different loops.
                All ranks raise it. If a rank could not plan, that rank raises its own error and the others this one.
        """
        self._loops += 1
        return self._compared(iter(steps), fingerprint, self._loops, first)

    def _compared(
        self, planning: Iterator[T], fingerprint: Callable[[T], Fingerprint], loop: int, first: int
    ) -> Iterator[T]:
        """Yields the steps of loop number ``loop``."""
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
        """Compares this rank's step with all others; arguments are this rank's."""
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
            raise PlanError(f"{who(states, _ENDED)} ended before step {number}, which the others planned.")
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
        """Tells all ranks how ``rank`` failed in step ``number``; raises on the ranks that have not failed."""
        said = "" if failure is None else _as_sentence(failure)
        everyone = [said] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, said, group=self._group)
        if failure is None:
            time.sleep(_FIRST_WORD_S)
            raise PlanError(f"Rank {rank} could not plan step {number}: {everyone[rank]}")


def _as_sentence(failure: Exception) -> str:
    return str(failure) if isinstance(failure, DistcaError) else traceback.format_exception_only(failure)[-1].strip()


def _unlike_first(values: Sequence[Any]) -> str | None:
    """Returns in words which ranks have another value than rank 0; None if all values are equal."""
    if len(set(values)) == 1:
        return None
    return who([each != values[0] for each in values], True)


def who(values: Sequence[Any], which: Any) -> str:
    """Returns in words which ranks have the value ``which``: "2 of 8 ranks (1, 5)"."""
    ranks = np.flatnonzero([value == which for value in values])
    some = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"{len(ranks)} of {len(values)} ranks ({some})"


def first_objection(mine: str | None) -> str | None:
    """Returns on all ranks the objection of the lowest rank that has one; None if no rank has one.

    All ranks call it together. Without torch.distributed it returns this process's objection.

    Args:
        mine: this rank's objection as part of a sentence, such as "the kernel is wrong"; None without one.
    """
    for rank, objection in enumerate(of_ranks(mine)):
        if objection is not None:
            return f"on rank {rank}, {objection}" if rank else objection
    return None


def on_all_ranks(check: Callable[[], T]) -> T:
    """Returns what ``check`` returns on this rank, once it has returned on all ranks, which call this together.

    So no rank goes on, and waits for one whose check raised an error. ``check`` itself must not wait for other ranks.

    Raises:
        Exception: what ``check`` raised on this rank.
        SupportError: ``check`` raised an error on other ranks only. The message has that of the first of them.
    """
    try:
        found, failure = check(), None
    except Exception as error:
        found, failure = None, error
    everyone = of_ranks(None if failure is None else _as_sentence(failure))
    if failure is not None:
        raise failure
    for rank, refusal in enumerate(everyone):
        if refusal is not None:
            raise SupportError(f"Rank {rank} refuses: {refusal}")
    return cast("T", found)


def of_ranks(mine: T) -> list[T]:
    """Returns every rank's ``mine``, by rank; all ranks call it together.

    Without torch.distributed it returns this process's alone."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    found = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def of_first_rank(make: Callable[[], T]) -> T:
    """Returns on every rank what ``make`` returns on rank 0, where alone it is called.

    All ranks call this function together.

    Raises:
        DistcaError: on every rank the error that ``make`` raised.
    """
    found: list[T | DistcaError | None] = [None]
    if dist.get_rank() == 0:
        try:
            found = [make()]
        except DistcaError as error:
            found = [error]
    dist.broadcast_object_list(found)
    if isinstance(found[0], DistcaError):
        raise found[0]
    return cast("T", found[0])
