"""Run a function on several ranks of this machine: over gloo without GPUs, or over NCCL with them."""

from __future__ import annotations

import faulthandler
import gc
import io
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, Store

from distca.cluster.interface import bind_gloo
from distca.testing import preloaded
from distca.testing.shared_gpus import share_gpus
from distca.transport.collective import nccl_goes_first

_preloaded = ["torch", "torch.distributed", "numpy"]
_LATER_S = 1.0
"""Seconds after a rank's error in which another rank's death may be seen."""
_STACKS_S = 0.5
"""Seconds in which ranks that are asked where they are say so."""
_TERMINATED_S = 10
"""Seconds after which a rank that does not end when it is terminated is killed."""
_HUNG_S = 600
"""Seconds after which an operation between ranks fails. The limit of a call is less, as a rule, and says more."""


def preload(*modules: str) -> None:
    """Import ``modules`` once, in the process that ranks are forked from, so that no rank has to; to be called before
    the first :func:`run_ranks`. They must not start threads or use a GPU when they are imported."""
    _preloaded.extend(modules)


def collect_seldom() -> None:
    """Leave what was imported before the fork out of garbage collections for good, and let these be rare: models are
    made of many objects, of which few are garbage."""
    gc.freeze()
    gc.unfreeze = _nothing  # after a run all imported objects would be looked at, and copied for each process
    gc.set_threshold(50_000, 20, 50)


def _nothing() -> None:
    pass


def forked(function: Callable[..., Any], *arguments: Any) -> ForkServerProcess:
    """Start ``function(*arguments)`` in a process that has imported what was named to :func:`preload`."""
    context = multiprocessing.get_context("forkserver")
    _start_server()
    process = context.Process(target=function, args=arguments)
    process.start()
    return process


def _start_server() -> None:
    """Start the process that ranks are forked from, where there is none yet."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if multiprocessing.parent_process() and server._forkserver_address:
        # This process was forked itself, from a server that forks for it too; by itself it would start a new one.
        server.ensure_running = _nothing
        return
    forkserver.set_forkserver_preload([preloaded.__name__])
    os.environ[preloaded.NAMES] = ",".join(_preloaded)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop(preloaded.NAMES, None)  # another thread that starts ranks may have done so


class RankFailure(RuntimeError):
    """A rank raised or died; the message holds its traceback."""


class World:
    """Processes that form one world and call one function after the other.

    Args:
        ranks: number of processes.
        gpus: give each rank a GPU, or one that it shares where there are fewer, and NCCL (gloo stays for CPU tensors).
        first_gpu: number of rank 0's GPU; the others follow, and the first GPU comes after the last.
    """

    def __init__(self, ranks: int, gpus: bool = False, first_gpu: int = 0) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="distca-ranks-")
        store = os.path.join(self._folder.name, "store")
        self._processes, self._pipes = [], []
        for rank in range(ranks):
            mine, theirs = multiprocessing.Pipe()
            self._processes.append(forked(_rank_main, rank, ranks, store, gpus, first_gpu, theirs))
            theirs.close()
            self._pipes.append(mine)

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float = 240.0) -> list[bytes]:
        """Calls ``function(*arguments)`` on every rank; after a failure only :meth:`end` may follow.

        Args:
            function: importable from a module; inside it torch.distributed is initialised.
            arguments: picklable, the same for every rank.
            timeout: seconds until a rank that neither returns nor raises counts as failed.

        Returns:
            What each rank returned, by rank, as ``torch.save`` writes it.

        Raises:
            RankFailure: a rank raised, died or took too long.
        """
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # of a rank that has died, which is seen below
                pipe.send((function, arguments))
        return _collect(self._pipes, self._processes, timeout)

    def close(self) -> None:
        """Lets all ranks come to their end.

        Raises:
            RankFailure: a rank ended with an error.
        """
        for pipe in self._pipes:
            with suppress(BrokenPipeError):
                pipe.send(None)
        # A rank that is done ends by itself: cut short, it would leave processes of its own behind.
        for rank, process in enumerate(self._processes):
            process.join(60)
            if process.exitcode:
                raise RankFailure(f"Rank {rank} gave an answer, then ended with exit code {process.exitcode}.")

    def end(self) -> None:
        """Ends what still runs."""
        for process in self._processes:
            if process.is_alive():
                process.terminate()
        for process in self._processes:
            process.join(_TERMINATED_S)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def run_ranks(
    ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 240.0, gpus: bool = False
) -> list[Any]:
    """Call ``function(*arguments)`` in ``ranks`` processes that form one world.

    Args:
        ranks: number of processes.
        function: importable from a module; inside it torch.distributed is initialised.
        arguments: picklable, the same for every rank.
        timeout: seconds until a rank that neither returns nor raises counts as failed.
        gpus: as for :class:`World`.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankFailure: a rank raised, died (also after it returned) or took too long; the others are ended.
    """
    world = World(ranks, gpus)
    try:
        answers = world.call(function, *arguments, timeout=timeout)
        world.close()
        return [loaded(answer) for answer in answers]
    finally:
        world.end()


def loaded(answer: bytes) -> Any:
    """Returns what a rank returned, from what :meth:`World.call` returns."""
    return torch.load(io.BytesIO(answer), weights_only=False)


def run_cases(
    ranks: int, function: Callable[..., Any], cases: Mapping[Any, tuple[Any, ...]], timeout: float = 240.0
) -> dict[Any, list[Any]]:
    """Call ``function(*arguments)`` for every case, one after the other, in one start of ``ranks`` processes.

    Args:
        ranks: number of processes.
        function: as in :func:`run_ranks`; it leaves nothing behind that the next case would see.
        cases: arguments by the case's name.
        timeout: seconds for all cases.

    Returns:
        By the case's name, what each rank returned.

    Raises:
        RankFailure: as :func:`run_ranks`.
    """
    by_rank = run_ranks(ranks, _each, function, cases, timeout=timeout)
    return {name: [results[name] for results in by_rank] for name in cases}


def _each(function: Callable[..., Any], cases: Mapping[Any, tuple[Any, ...]]) -> dict[Any, Any]:
    return {name: function(*arguments) for name, arguments in cases.items()}


def _collect(pipes: list[Connection], processes: list[ForkServerProcess], timeout: float) -> list[bytes]:
    results: dict[int, bytes] = {}
    until = time.monotonic() + timeout
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, max(0.0, until - time.monotonic()))
        if not ready:
            silent = [rank for rank in range(len(pipes)) if rank not in results]
            for rank in silent:  # which say on stderr where they are
                with suppress(ProcessLookupError):
                    os.kill(processes[rank].pid or 0, signal.SIGUSR1)
            time.sleep(_STACKS_S)
            raise RankFailure(f"Ranks {silent} gave no answer within {timeout:.0f} s.")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                failed, payload = pipe.recv()
            except (EOFError, ConnectionResetError):
                raise RankFailure(f"Rank {rank} died without a word.") from None
            if failed:
                died = _died([each for each in waiting if each is not pipe])
                why = f"Rank {pipes.index(died)} died without a word, and then:\n" if died else ""
                raise RankFailure(f"{why}Rank {rank} failed:\n{payload}")
            results[rank] = payload
    return [results[rank] for rank in range(len(pipes))]


def _died(pipes: list[Connection]) -> Connection | None:
    """Returns the pipe of a rank that has died, or dies within ``_LATER_S``; other ranks may fail of that first."""
    for pipe in wait(pipes, _LATER_S):
        assert isinstance(pipe, Connection)
        try:
            pipe.recv()
        except EOFError:
            return pipe
    return None


def _rank_main(rank: int, ranks: int, store: str, gpus: bool, first_gpu: int, pipe: Connection) -> None:
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    if not gpus:  # there a run's model has to go with the run: the next one needs its memory
        collect_seldom()
    try:
        if gpus:
            torch.cuda.set_device(share_gpus(rank, ranks, first_gpu))
            nccl_goes_first()
        bind_gloo()
        share_gloo_device()
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=_HUNG_S)
        )
        while (asked := pipe.recv()) is not None:
            function, arguments = asked
            buffer = io.BytesIO()
            torch.save(function(*arguments), buffer)
            # Nobody may leave while others still talk to it, or begin what comes next.
            dist.barrier()
            pipe.send((False, buffer.getvalue()))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


_made_alone = ProcessGroupGloo.__init__


def share_gloo_device() -> None:
    """Let all gloo groups that this process makes from now on listen on one device.

    By itself every group makes a device, whose thread wakes up a hundred times a second, also where nothing is sent.
    A rank has some thirty groups, so ranks on a few cores would spend a tenth of their time on this.
    """
    ProcessGroupGloo.__init__ = _made  # type: ignore[method-assign,assignment]


def _made(group: ProcessGroupGloo, store: Store, rank: int, size: int, timeout: timedelta) -> None:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._timeout = [_device(os.environ.get("GLOO_SOCKET_IFNAME"))], timeout
    _made_alone(group, store, rank, size, options)


@cache
def _device(interface: str | None) -> Any:
    """The device of an interface, which gloo takes from the environment."""
    return ProcessGroupGloo.create_default_device()
