"""Steps made ahead, in order; loops of them that are nested or left early, on ranks that wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import torch

from distca.errors import DistcaError
from distca.plan import PlanOptions, area_cost
from distca.testing.ranks import run_ranks

CPU = torch.device("cpu")


def _step(lengths: list[int], first_id: int = 0) -> Any:
    from megatron_patches.steps.step import Taker, make_step
    from megatron_patches.steps.step_documents import StepDocuments

    documents = StepDocuments([[first_id + np.arange(length) for length in lengths]], note=lengths[0])
    return make_step(documents, PlanOptions(2, area_cost(4, 2, 8), nano_batches=2), Taker(0, 0, "cpu"))


def test_the_next_step_is_made_from_when_one_is_queued_and_the_steps_end() -> None:
    from megatron_patches.steps.steps_ahead import StepsAhead, planning_thread

    made: list[tuple[int, str]] = []
    started = threading.Event()

    def steps() -> Iterator[Any]:
        for number in range(3):
            made.append((number, threading.current_thread().name))
            if number == 1:
                started.set()
            yield _step([number + 1, 3])

    notes = []
    for step in StepsAhead(steps(), planning_thread(CPU)):
        notes.append(step.documents.note)
        if len(notes) == 1:
            assert not started.wait(0.2), "nothing is made before the step is queued"
            step.queued()
            assert started.wait(60)
    assert notes == [1, 2, 3] and [number for number, _ in made] == [0, 1, 2]
    assert all(name.startswith("distca-planning") for _, name in made)


def _said(function: Any, *arguments: Any) -> str:
    try:
        function(*arguments)
    except DistcaError as error:
        return str(error)
    return ""


def _loops() -> dict[str, Any]:
    """What each of two ranks meets, one of them slow to plan."""
    import time

    import torch.distributed as dist

    from megatron_patches.steps.steps_ahead import AgreedSteps

    rank, agreed = dist.get_rank(), AgreedSteps(CPU)

    def steps(*lengths: int) -> Iterator[Any]:
        for length in lengths:
            time.sleep(0.05 * rank)
            yield _step([length, 3])

    def loop(most: int, *lengths: int) -> list[int]:
        notes: list[int] = []
        for step in agreed.ahead(steps(*lengths), 1):
            step.queued()
            notes.append(step.documents.note)
            if len(notes) == most:
                break
        return notes

    found: dict[str, Any] = {"left early": [loop(2, 5, 6, 7, 8), loop(9, 1, 2)]}

    nested = []
    for step in agreed.ahead(steps(10, 20, 30), 1):
        step.queued()
        nested.append([step.documents.note, *loop(1 if step.documents.note == 20 else 9, 1, 2)])
    found["nested"] = nested

    held = agreed.ahead(steps(5, 6, 7), 1)
    next(held).queued()
    found["beside one that is held"] = [loop(9, 1, 2), [step.documents.note for step in held]]

    made: list[int] = []

    def counted() -> Iterator[Any]:
        for length in (5, 6):
            made.append(length)
            yield _step([length, 3])

    dropped = next(agreed.ahead(counted(), 1))
    dropped.queued()
    found["after one that was dropped"] = [loop(9, 4), made]

    found["one inside another"] = _said(next, agreed.ahead((next(agreed.ahead(steps(1), 1)) for _ in range(1)), 1))

    with closing(agreed.ahead(map(_step, [[9, 9]], [rank]), 1)) as ahead:
        found["other ids"] = _said(next, ahead)
    with closing(agreed.ahead(steps(9 + rank), 4)) as ahead:
        found["other lengths"] = _said(next, ahead)
    if rank == 0:
        agreed.ahead(steps(1), 1)
    with closing(agreed.ahead(steps(1), 1)) as ahead:
        found["another loop"] = _said(next, ahead)
    return found


def test_loops_may_be_nested_and_left_early() -> None:
    for found in run_ranks(2, _loops):
        assert found["left early"] == [[5, 6], [1, 2]]
        assert found["nested"] == [[10, 1, 2], [20, 1], [30, 1, 2]]
        assert found["beside one that is held"] == [[1, 2], [6, 7]]
        assert found["after one that was dropped"] == [[4], [5]], "nobody takes the next step"
        assert found["one inside another"].startswith("The iterable that plan_ahead was given asks for a planned step")
        assert found["other ids"].startswith("1 of 2 ranks (1) gave other documents to step 1 than rank 0, of the same")
        assert found["other lengths"].startswith("1 of 2 ranks (1) planned step 4 differently from rank 0")
        assert found["another loop"].startswith("1 of 2 ranks (1) planned another step than rank 0: ranks left a loop")
