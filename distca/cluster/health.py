"""Watching over the other ranks: when one of them dies, the rest says so in a sentence and ends within seconds.

A rank that is killed leaves the others waiting for it: on NCCL inside the driver, on gloo until a connection breaks.
A thread of every rank therefore looks after the processes of its machine and, through the store of torch.distributed,
hears of deaths on other machines. It works while the main thread waits for a GPU or for other ranks.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from distca.cluster.hostname import machine_name

logger = logging.getLogger(__name__)

_PERIOD = 1.0
"""Seconds between two looks."""
_GRACE = 2.0
"""Seconds that ranks have to end by themselves, each with its own words, before one speaks for a dead one."""
_KEY = "distca/ended"


class Companions:
    """The other ranks of a run. Every rank makes one together, after torch.distributed is initialised.

    Args:
        give_up: ends this process with an exit code, whatever its threads wait for.
    """

    def __init__(self, give_up: Callable[[int], Any] = os._exit) -> None:
        self._rank = dist.get_rank()
        mine = (machine_name(), os.getpid(), psutil.Process().create_time())
        everyone: list[tuple[str, int, float]] = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        here = {rank: place for rank, place in enumerate(everyone) if place[0] == mine[0] and rank != self._rank}
        self._processes = {rank: (pid, born) for rank, (_, pid, born) in here.items()}
        self._doing = "starting"
        self._give_up = give_up
        # The main thread may find the same death as the watching one; neither may end the process before it was said.
        self._leaving = threading.Lock()
        self._store = _own_connection()
        self._stop = threading.Event()
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        self._hear_signals()
        self._thread = threading.Thread(target=self._watch, name="distca-companions", daemon=True)
        self._thread.start()

    def doing(self, what: str) -> None:
        """Note what this rank is at, such as "step 7"; a rank that dies is said to have died in it."""
        self._doing = what

    def part(self) -> None:
        """Stop watching, on all ranks: from here on they may end one by one. Every rank calls it together."""
        self._stop.set()
        self._thread.join()
        dist.barrier()
        if threading.current_thread() is threading.main_thread():
            _forget_signals()

    def explain_failure(self) -> None:
        """Called when something failed on this rank: if that is because another rank died, end here, with a sentence
        instead of a trace of where this one happened to wait."""
        end = time.monotonic() + _GRACE
        while time.monotonic() < end:
            dead = self._dead()
            if dead:
                self._end(dead)
            time.sleep(0.1)

    def _hear_signals(self) -> None:
        """Let the thread know at once when this process is told to end: a launcher that saw a rank die does so, and the
        main thread may be waiting in a place where Python cannot run a handler."""
        if threading.current_thread() is not threading.main_thread():
            return
        signal.signal(signal.SIGTERM, lambda *_: None)  # the thread acts
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget_signals)

    def _watch(self) -> None:
        while not self._stop.is_set():
            told = self._told_to_end(_PERIOD)
            dead = self._dead()
            if dead and not told:
                # Ranks that all end for one reason, a wrong setting for example, each end by themselves.
                self._stop.wait(_GRACE)
                dead = self._dead()
            if self._stop.is_set():
                return
            if dead:
                self._end(dead)
            if told:
                self._leave(128 + signal.SIGTERM)
            if self._store is not None and _said_elsewhere(self._store):
                self._leave(1)

    def _told_to_end(self, seconds: float) -> bool:
        """Wait for a signal; an interrupt from the keyboard reaches all ranks and needs no words."""
        if not select.select([self._wake], [], [], seconds)[0]:
            return False
        signals = os.read(self._wake, 4096)
        if signal.SIGINT in signals:
            self._stop.set()
        return signal.SIGTERM in signals

    def _dead(self) -> list[int]:
        return [rank for rank, (pid, born) in self._processes.items() if not _alive(pid, born)]

    def _leave(self, code: int) -> None:
        with self._leaving:
            self._give_up(code)

    def _end(self, dead: list[int]) -> None:
        with self._leaving:
            self._speak_for(dead)
            self._give_up(1)

    def _speak_for(self, dead: list[int]) -> None:
        if _first_to_speak(self._store):
            who = f"Rank {dead[0]}" if len(dead) == 1 else f"Ranks {', '.join(map(str, dead))}"
            whose = f"process {', '.join(str(self._processes[rank][0]) for rank in dead)} on {socket.gethostname()}"
            logger.error(
                "%s died in %s (%s): killed from outside, out of memory, or by an error that it reported above. All "
                "other ranks end too. Start again with RESUME=latest (checkpoint.resume latest) to go on from the last "
                "checkpoint.",
                who,
                self._doing,
                whose,
            )
            for handler in logging.getLogger().handlers:
                handler.flush()


def _forget_signals() -> None:
    """In a forked child: it shares the pipe, but what it is told does not concern this rank."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _alive(pid: int, born: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - born) < 1
    except psutil.NoSuchProcess:
        return False


def _own_connection() -> Any:
    """A connection to the store that the main thread does not wait on; None where torch has no such thing."""
    try:
        store: Any = dist.distributed_c10d._get_default_store()
        store = store.clone()
        store.set_timeout(timedelta(seconds=5))
        return store
    except Exception:
        return None


def _first_to_speak(store: Any) -> bool:
    try:
        return store is None or store.add(_KEY, 1) == 1
    except Exception:  # the store's own rank is the dead one
        return True


def _said_elsewhere(store: Any) -> bool:
    try:
        return bool(store.check([_KEY]))
    except Exception:  # the machine that holds the store is gone, and with it the run
        logger.error("The machine of rank 0 cannot be reached any more; this rank ends.")
        return True
