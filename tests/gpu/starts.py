"""Cases of GPU tests: what ranks do for them, in worlds that many tests share (``worlds.py``).

A file of tests has ``cases(folder)``, by name. The tests' fixture ``starts`` hands in all that selected tests need at
once, and a test asks for the result of its own.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from distca.testing.ranks import RankFailure, loaded
from tests.gpu.outcomes import TIME_IS_OVER

SPOOL = "DISTCA_SPOOL"
"""The variable with the folder that worlds take cases from, if another process runs them."""


@dataclass(frozen=True)
class Case:
    """What some ranks do, after and before other cases in the same processes; it leaves nothing behind.

    NVSHMEM starts once in a process, over one server pool. So cases of one world have the same pool, or one without
    other ranks.

    Attributes:
        ranks: how many.
        function: importable from a module.
        arguments: picklable.
        world: cases with different names here share no processes.
        needs: names of cases that have to be done before.
        limit_s: seconds that it may take, once it has begun.
        launches: processes on GPUs that it starts itself.
    """

    ranks: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    world: str = ""
    needs: tuple[str, ...] = ()
    limit_s: float = 300.0
    launches: int = 0


@dataclass(frozen=True)
class Asked:
    """A case as it is handed in, in a file; its answer comes into the file of that name that ends in ``.answer``.

    Attributes:
        name: of the file of tests, and of the case.
        ranks, world, limit_s, launches: of the case.
        needs: files of answers that have to be there before.
        call: the function and its arguments, pickled. Only ranks import the module.
    """

    name: str
    ranks: int
    world: str
    limit_s: float
    launches: int
    needs: tuple[Path, ...]
    call: bytes


@dataclass(frozen=True)
class Answer:
    """What became of a case.

    Attributes:
        results: what each rank returned, saved; None if the case failed or time was over.
        failure: why it failed; "" if time was over.
    """

    results: list[bytes] | None
    failure: str = ""


def write_whole(path: Path, content: object) -> None:
    """Pickles ``content``; who finds the file finds all of it."""
    unfinished = path.with_name(f"{path.name} unfinished")
    unfinished.write_bytes(pickle.dumps(content))
    unfinished.rename(path)


class Starts:
    """The cases of a file's tests.

    Args:
        spool: the folder that worlds take cases from.
        folder: what cases write is here.
        subject: a name of the file of tests.
        cases: all of the file's cases by name.
        selected: names of the cases whose tests are to run, up to a colon; others need not exist.
    """

    def __init__(
        self, spool: Path, folder: Path, subject: str, cases: Mapping[str, Case], selected: Collection[str]
    ) -> None:
        self.folder, self._parent = folder, os.getppid() if SPOOL in os.environ else None
        wanted = [name for name in cases if name.partition(": ")[0] in selected]
        for name in wanted:  # grows
            wanted += [each for each in cases[name].needs if each not in wanted]
        own = spool / f"{subject}-{os.getpid()}"
        own.mkdir()
        self._answers = {name: own / f"{number}.answer" for number, name in enumerate(cases)}
        for name in sorted(wanted, key=list(cases).index):
            case = cases[name]
            needs = tuple(self._answers[each] for each in case.needs)
            call = pickle.dumps((case.function, case.arguments))
            asked = Asked(f"{subject}: {name}", case.ranks, case.world, case.limit_s, case.launches, needs, call)
            write_whole(self._answers[name].with_suffix(".case"), asked)

    def result(self, name: str) -> list[Any]:
        """Returns what the case with this name returned, by rank.

        Raises:
            RankFailure: the case failed.
            pytest.skip.Exception: it was not done when time was over.
        """
        path = self._answers[name]
        while not path.exists():
            if self._parent is not None and os.getppid() != self._parent:
                raise RankFailure("The process that runs all tests has died.")
            time.sleep(0.05)
        answer: Answer = pickle.loads(path.read_bytes())
        if answer.results is None:
            if answer.failure:
                raise RankFailure(answer.failure)
            pytest.skip(TIME_IS_OVER)
        return [loaded(each) for each in answer.results]
