"""Cases of several tests in one start of ranks.

A start takes 20 to 60 s, in which every rank imports Megatron-Core and compiles kernels. Most cases take a few seconds.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distca.testing.ranks import RankFailure, run_ranks

logger = logging.getLogger(__name__)
Case = tuple[Any, ...]
"""A function that can be imported from a module, and its arguments."""
AT_ONCE = 4
"""Starts of a file."""


class Starts:
    """The starts of a file's tests.

    NVSHMEM starts once in a process, over one server pool. So cases of one start have the same pool, or one without
    other ranks.

    Args:
        folder: an empty folder for what cases return.
        selected: names of the cases whose tests are to run.
        gpus: whether ranks have GPUs.
    """

    def __init__(self, folder: Path, selected: Collection[str], gpus: bool = True) -> None:
        self._folder, self._selected, self._gpus = folder, selected, gpus
        self._begun: dict[str, Future[dict[str, Any]]] = {}
        self._pool = ThreadPoolExecutor(AT_ONCE)

    def begin(self, start: str, ranks: int, cases: Mapping[str, Case], timeout: float = 600.0) -> None:
        """Begins a start, if it has not begun yet, and returns at once. It runs all of its selected cases.

        Args:
            start: a name for the start.
            ranks: how many.
            cases: all cases of the start, by name.
            timeout: seconds for all cases.
        """
        if start not in self._begun:
            folder = self._folder / str(len(self._begun))
            folder.mkdir()
            selected = {each: case for each, case in cases.items() if each in self._selected}
            self._begun[start] = self._pool.submit(_run, folder, ranks, selected, timeout, self._gpus)

    def result(self, start: str, name: str, ranks: int, cases: Mapping[str, Case], timeout: float = 600.0) -> list[Any]:
        """Returns what the case with this name returned, by rank. Other arguments are those of :meth:`begin`.

        Raises:
            RankFailure: the case failed.
        """
        self.begin(start, ranks, cases, timeout)
        answer = self._begun[start].result()[name]
        if isinstance(answer, RankFailure):
            raise RankFailure(str(answer))
        results: list[Any] = answer
        return results

    def close(self) -> None:
        """Waits for all starts."""
        self._pool.shutdown()


def _run(folder: Path, ranks: int, cases: Mapping[str, Case], timeout: float, gpus: bool) -> dict[str, Any]:
    """By case what ranks returned, or the failure. After a failure the cases behind it run in another start."""
    found: dict[str, Any] = {}
    left = list(cases)
    while left:
        failure: RankFailure | None = None
        try:
            run_ranks(ranks, _each, folder, {name: cases[name] for name in left}, timeout=timeout, gpus=gpus)
        except RankFailure as error:
            failure = error
        done = [name for name in left if all(_file(folder, name, rank).exists() for rank in range(ranks))]
        for name in done:
            found[name] = [torch.load(_file(folder, name, rank), weights_only=False) for rank in range(ranks)]
        left = [name for name in left if name not in done]
        if failure is not None:
            failed = left.pop(0) if left else done[-1]
            logger.info("%s failed: %s", failed, failure)
            found[failed] = failure
    return found


def _each(folder: Path, cases: Mapping[str, Case]) -> None:
    for name, (function, *arguments) in cases.items():
        answer = function(*arguments)
        unfinished = folder / f"{dist.get_rank()}"
        torch.save(answer, unfinished)
        unfinished.rename(_file(folder, name, dist.get_rank()))
        dist.barrier()  # a rank that fails in the next case would end others in this one
        gc.collect()
        torch.cuda.empty_cache()


def _file(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name} of rank {rank}"
