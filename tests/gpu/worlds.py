"""Worlds of ranks that run the cases of GPU tests, one after the other, from whichever file they come.

To start ranks takes 20 to 100 s, in which every rank imports Megatron-Core and compiles kernels. Most cases take a few
seconds. So ranks stay, and get the next case; only after a failure others are started.
"""

from __future__ import annotations

import gc
import json
import logging
import pickle
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distca.testing.ranks import RankFailure, World
from distca.transport import choose_transport
from tests.gpu.starts import Answer, Asked, write_whole

logger = logging.getLogger(__name__)
GIB_PER_RANK = 16
"""A GPU has one rank at a time for so many GiB of its memory: four on an H100, eight on an H200. In much of a case only
the CPU works."""
RANKS_ON_CPUS = 4
"""The most ranks at a time where there are no GPUs, or for each GPU that a test pretends to have."""
IDLE_S = 10.0
"""Seconds that a world without a case is kept for those of files that begin late."""
STARTED_S = 300.0
"""Seconds that ranks may take to start."""
POLL_S = 0.1
RECOMPILED = 32
"""How often torch.compile may compile a function anew in a process. Beyond this number it runs the function uncompiled,
and a run that is repeated meanwhile has other bits. Many cases would reach torch's own limit of 8."""


class Sort(NamedTuple):
    """Which cases may share processes.

    Attributes:
        ranks: of a world.
        world: a case's name for it.
        places: ranks on GPUs, those that cases launch too.
    """

    ranks: int
    world: str
    places: int


class Worlds:
    """Runs cases from a folder until it is closed.

    Args:
        spool: the folder.
        gpus: how many; without any, ranks are on CPUs.
        until: the time, by ``time.monotonic``, when cases that are not done are given up.
        record: the file that gets a line with the seconds of each case; None for none.
    """

    def __init__(self, spool: Path, gpus: int, until: float = float("inf"), record: Path | None = None) -> None:
        self.failures: list[str] = []
        """How ranks failed that had done their cases."""
        self._spool, self._gpus, self._until, self._record = spool, gpus, until, record
        self._free = _most_ranks() * max(1, gpus)
        self._places = self._free
        self._seen: set[Path] = set()
        self._queues: dict[Sort, list[tuple[Path, Asked]]] = {}
        self._worlds, self._ranks_of_gpu = Counter[Sort](), [0] * max(1, gpus)
        self._lock, self._closing, self._starved = threading.RLock(), False, False
        self._threads = [threading.Thread(target=self._watch)]
        self._running: set[World] = set()

    def __enter__(self) -> Worlds:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for cases that have begun; others are left out."""
        self._closing = True
        with self._lock:
            for queue in self._queues.values():
                queue.clear()
        for thread in self._threads:  # grows until the first one has ended
            thread.join()

    def stop(self) -> None:
        """Gives up all cases, also those that have begun."""
        self._until = 0.0
        for world in list(self._running):
            world.end()

    def _watch(self) -> None:
        while not self._closing:
            with self._lock:
                for path in sorted(set(self._spool.glob("*/*.case")) - self._seen):
                    self._seen.add(path)
                    asked: Asked = pickle.loads(path.read_bytes())
                    places = min(asked.launches or asked.ranks, self._places)
                    self._queues.setdefault(Sort(asked.ranks, asked.world, places), []).append((path, asked))
                if time.monotonic() < self._until:
                    self._start_worlds()
                else:
                    self._give_up()
            time.sleep(POLL_S)

    def _give_up(self) -> None:
        for queue in self._queues.values():
            for path, _ in queue:
                write_whole(path.with_suffix(".answer"), Answer(None))
            queue.clear()

    def _start_worlds(self) -> None:
        """First one of each sort, then more for those with many cases."""
        waiting = Counter({sort: sum(map(_may_begin, queue)) for sort, queue in self._queues.items()})
        self._starved = False
        for sort in sorted(+waiting, key=lambda each: (self._worlds[each], -waiting[each])):
            there = self._worlds[sort]
            if there and (self._starved or waiting[sort] <= there):
                continue
            if sort.places > self._free:
                self._starved |= not there
                continue
            first = self._least_busy(sort.ranks)
            self._occupy(sort, first, 1)
            thread = threading.Thread(target=self._serve, args=(sort, first))
            self._threads.append(thread)
            thread.start()

    def _least_busy(self, ranks: int) -> int:
        """The first of as many neighbouring GPUs as there are ranks."""
        count = len(self._ranks_of_gpu)
        firsts = range(0, count, min(ranks, count))
        return min(firsts, key=lambda first: sum(self._ranks_of_gpu[gpu] for gpu in _gpus(first, ranks, count)))

    def _occupy(self, sort: Sort, first: int, by: int) -> None:
        with self._lock:
            self._worlds[sort] += by
            self._free -= by * sort.places
            for gpu in _gpus(first, sort.ranks, len(self._ranks_of_gpu)):
                self._ranks_of_gpu[gpu] += by

    def _serve(self, sort: Sort, first: int) -> None:
        """One world, or after failures one after the other, until no case is left."""
        world, last = None, time.monotonic()
        while (taken := self._next(sort)) or self._stays(sort, last):
            if not taken:
                time.sleep(POLL_S)
                continue
            path, asked = taken
            began = time.monotonic()
            try:
                if world is None:
                    world = World(sort.ranks, self._gpus > 0, first)
                    self._running.add(world)
                    if self._gpus:
                        world.call(prepare, not sort.world, timeout=self._left(STARTED_S))
                answer = Answer(world.call(run_case, asked.call, timeout=self._left(asked.limit_s)))
            except Exception as failure:
                answer = Answer(None, "" if time.monotonic() > self._until else str(failure) or repr(failure))
                self._end(world)
                world = None
            last = time.monotonic()
            self._note(asked, first, last - began, answer)
            write_whole(path.with_suffix(".answer"), answer)
        try:
            if world and self._left(IDLE_S):
                world.close()
        except RankFailure as failure:
            self.failures.append(f"{sort.ranks} ranks: {failure}")
        finally:
            self._end(world)
            self._occupy(sort, first, -1)

    def _left(self, limit_s: float) -> float:
        return max(0.0, min(limit_s, self._until - time.monotonic()))

    def _end(self, world: World | None) -> None:
        if world is not None:
            self._running.discard(world)
            world.end()

    def _next(self, sort: Sort) -> tuple[Path, Asked] | None:
        with self._lock:
            if self._starved and self._worlds[sort] > 1:
                return None  # others have not even one
            queue = self._queues[sort]
            ready = [each for each in queue if _may_begin(each)]
            if not ready:
                return None
            longest = max(ready, key=lambda each: each[1].limit_s)  # the first of equal ones
            queue.remove(longest)
            return longest

    def _stays(self, sort: Sort, last: float) -> bool:
        """Whether a world without a case waits for one."""
        return not self._closing and not self._starved and time.monotonic() < last + IDLE_S

    def _note(self, asked: Asked, first: int, seconds: float, answer: Answer) -> None:
        ended = "done" if answer.results else "failed" if answer.failure else "not done"
        line = {"case": asked.name, "ranks": asked.ranks, "first_gpu": first, "seconds": round(seconds, 1), "is": ended}
        if self._record is not None:
            with self._lock, self._record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        logger.info("%s", line)


def _most_ranks() -> int:
    """The most ranks on a GPU, or on the CPUs, at a time."""
    if not torch.cuda.is_available():
        return RANKS_ON_CPUS
    return max(1, int(torch.cuda.get_device_properties(0).total_memory / 2**30 / GIB_PER_RANK))


def _gpus(first: int, ranks: int, count: int) -> list[int]:
    return [(first + rank) % count for rank in range(ranks)]


def _may_begin(case: tuple[Path, Asked]) -> bool:
    return all(path.exists() for path in case[1].needs)


def prepare(starts_nvshmem: bool) -> None:
    """Makes a rank ready for many cases. NVSHMEM starts with memory for all of them: it cannot get more later."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = RECOMPILED
    if starts_nvshmem and dist.get_world_size() > 1:
        import megatron_patches.api  # noqa: F401 - before NVSHMEM, as in training

        choose_transport("auto", dist.group.WORLD)


def run_case(call: bytes) -> Any:
    """A rank's part of a case."""
    function, arguments = pickle.loads(call)
    result = function(*arguments)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result
