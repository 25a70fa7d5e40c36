"""Watching over the ranks of a run: when one fails, dies or is lost, all others say so and end within seconds.

A rank that is gone leaves the others waiting for it: on NCCL inside the driver, on gloo until a connection breaks, on
NVSHMEM for ever. Therefore a thread of every rank looks around once a second. It looks at the processes of its node,
and at the waits that streams queued (:mod:`distca.cluster.waits`). From the store of torch.distributed it learns of
other nodes and of failures (:mod:`distca.cluster.board`). The thread works while the main thread waits for a GPU or for
other ranks.

Ranks end by leaving at once: whoever takes leave politely, of a process group for example, waits for the others.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from distca.cluster.board import Board, Failure
from distca.cluster.process import Member
from distca.cluster.waits import Stuck, Wait, Waits
from distca.errors import DistcaError
from distca.log import MISTAKE, console, say_mistake

if TYPE_CHECKING:
    from distca.cluster.member import Members

logger = logging.getLogger(__name__)

EXIT_CODE = 71
"""A rank that waits for one which has ended leaves with this code."""

_ENDING = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that schedulers and launchers send before they end a run."""
_PERIOD_S = 1.0
_DEATH_S = 1.0
"""Until a dead process is named: it may have posted what it died of."""
_FAILURE_S = 3.0
"""Until an error is posted as this rank's own: it may follow from the death of another, which is named sooner."""
_MISTAKE_S = 3.0
"""Until this rank repeats the mistake that another one posted: it may be about to find the same."""
_HEARD_S = 4.0
"""Until a rank ends that has said why: a launcher that sees one end may end the others before they have said it."""
_LOST_S = 40.0
"""Until a node that gives no sign of life counts as lost."""
_BROKEN_S = 5.0
"""Until a server without a model ends whose connection to the store is closed: its homes are gone."""
_WAIT_GRACE_S = 4.0
_WARN_EVERY_S = 60.0
_GO_ON = "Go on from the last checkpoint."

_of_process: Health | None = None
"""A process needs no two of them: what queues waits finds the one that watches its run."""


class Health:
    """Watches over the ranks of a group. They make it together, after torch.distributed is initialised.

    Args:
        group: the ranks; None are all of the world.
        ends_with_ranks: every death ends this rank; otherwise only that of a rank that a queued wait needs.
        give_up: ends this process with an exit code, whatever its threads wait for.
        pool: homes and servers without a model, where there are some; they are watched over in place of a group.

    Attributes:
        asked_by: the signal that asked this rank to end, while it and all others could go on; empty without one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        ends_with_ranks: bool = True,
        give_up: Callable[[int], Any] = os._exit,
        pool: Members | None = None,
    ) -> None:
        global _of_process
        self._pool, self._give_up = pool, give_up
        if pool is None:
            ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
            self._rank, mine = dist.get_rank(), Member.here()
            everyone = [mine] * len(ranks)
            dist.all_gather_object(everyone, mine, group=group)
        else:
            everyone, self._rank = pool.everyone, pool.own
            ranks = list(range(len(everyone)))
        self._hosts = {rank: each.host for rank, each in zip(ranks, everyone, strict=True)}
        self._processes = {rank: each.process for rank, each in zip(ranks, everyone, strict=True)}
        self._may_go = set() if pool is None else pool.may_go
        self.asked_by = ""
        self._stops_when_asked = False
        self._doing = "starting"
        # The main thread may find the same failure as the watching one; neither may end the process before it was said.
        self._leaving = threading.Lock()
        self._waits: list[Waits] = []
        self._warned_at = 0.0
        self._stop = threading.Event()
        self._board = (
            Board(self._rank, [each.process.space for each in everyone], _store_of(pool)) if ends_with_ranks else None
        )
        self._wake, self._woken = os.pipe()
        if ends_with_ranks:
            self._hear_signals()
        self._thread = threading.Thread(target=self._watch, name="distca-health", daemon=True)
        self._thread.start()
        # A thread that is inside torch while Python shuts down could end the process with an error.
        atexit.register(self.stop)
        _of_process = self

    @property
    def servers(self) -> list[str]:
        """Hosts of servers without a model, in order."""
        return [] if self._pool is None else [each.host for each in self._pool.everyone[self._pool.homes :]]

    def doing(self, what: str) -> None:
        """Note what this rank is at, such as "step 7"; a failure is said to have happened in it."""
        self._doing = what

    def stops_when_asked(self) -> None:
        """From here on SIGTERM only sets ``asked_by``, unless another rank is the reason for it. SIGUSR1 always does no
        more: it is sent some time before a run has to end."""
        self._stops_when_asked = True

    def watch_waits(self, group: dist.ProcessGroup, missing: Callable[[Wait], list[int]]) -> Waits:
        """Watch the waits for peers in ``group`` that are noted in what this returns; ``missing`` as there."""
        self._waits.append(Waits(dist.get_process_group_ranks(group), missing))
        return self._waits[-1]

    @contextmanager
    def ends_failures(self) -> Iterator[None]:
        """End all ranks with what is raised inside: before anything is cleaned up that could wait for them."""
        try:
            yield
        except KeyboardInterrupt:
            self._leave(128 + signal.SIGINT)
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """End this rank and all others with an error, or with what it follows from: a rank that died before."""
        failure = self._failure_of(error)
        end = time.monotonic() + (0 if isinstance(error, DistcaError) else _FAILURE_S)
        while time.monotonic() < end and self._known() is None and not self._dead():
            time.sleep(0.1)
        dead = self._dead()
        self._end(self._death_of(dead) if dead and not isinstance(error, DistcaError) else failure, failure.kind)
        raise SystemExit(failure.code)  # only where giving up is a stand-in

    def part(self) -> None:
        """Stop watching, on all ranks: from here on they may end one by one. Every rank calls it together. Servers
        without a model end then."""
        dist.barrier()
        self.stop()
        dist.barrier()  # nobody ends while another one still watches
        if self._pool is not None:
            self._pool.let_servers_go()
        if threading.current_thread() is threading.main_thread():
            _forget_signals(signal.SIG_IGN)  # a scheduler may repeat them, when nothing is left to save

    def stop(self) -> None:
        """Watch no longer."""
        global _of_process
        self._stop.set()
        if self._board is not None:
            self._board.stop()
        self._thread.join(5)
        if _of_process is self:
            _of_process = None

    def _hear_signals(self) -> None:
        """Let the thread know at once when this process is told to end: the main thread may be waiting in a place where
        Python cannot run a handler."""
        if threading.current_thread() is not threading.main_thread():
            return
        os.set_blocking(self._woken, False)
        for number in _ENDING:
            signal.signal(number, lambda *_: None)  # the thread acts
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget_signals)

    def _watch(self) -> None:
        while not self._stop.is_set():
            told = self._signals(_PERIOD_S)
            if not self._stop.is_set():
                self._look_at_waits()
            if self._board is not None and not self._stop.is_set():
                self._look_at_ranks(next((number for number in _ENDING if number in told), None))

    def _signals(self, seconds: float) -> bytes:
        """Wait for signals; an interrupt from the keyboard reaches all ranks and needs no words."""
        if not select.select([self._wake], [], [], seconds)[0]:
            return b""
        signals = os.read(self._wake, 4096)
        if signal.SIGINT in signals:
            self._stop.set()
        return signals

    def _look_at_ranks(self, told: signal.Signals | None) -> None:
        board, pool = self._board, self._pool
        assert board is not None
        if pool is not None and pool.is_server and board.broken < _BROKEN_S and pool.is_over():
            self._leave(0)  # whatever its main thread waits for: it holds nothing
        if told is not None or self._dead():
            self._wait_for(lambda: board.failure is not None or (told is not None and bool(self._dead())), _DEATH_S)
        if board.failure is not None:
            if board.failure.is_mistake:
                self._stop.wait(_MISTAKE_S)
            self._end(board.failure)
        elif dead := self._dead():
            self._end(self._death_of(dead))
        elif lost := [
            node for node in board.lost_nodes(_LOST_S) if not self._may_go.issuperset(self._ranks_of([node]))
        ]:
            self._end(self._loss_of(lost))
        elif board.silence() > _LOST_S or (pool is not None and pool.is_server and board.broken >= _BROKEN_S):
            self._end(self._loss_of_store(board.silence()))
        elif told is not None and (self._stops_when_asked or told == signal.SIGUSR1):
            # A scheduler may tell a rank twice: by itself and by its launcher.
            self.asked_by = self.asked_by or told.name
        elif told is not None:
            self._leave(128 + told)

    def _wait_for(self, happened: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not happened() and not self._stop.wait(0.1):
            pass

    def _look_at_waits(self) -> None:
        for waits in self._waits:
            stuck = waits.stuck()
            if stuck is None:
                continue
            gone = self._gone(stuck)
            if not gone:
                self._warn(stuck)
                continue
            # A run that ends with its ranks names the death by itself, and knows the step as well. And a rank that
            # ended as it should delivered before.
            if self._stop.wait(_WAIT_GRACE_S) or (stuck := waits.stuck()) is None or not self._gone(stuck):
                continue
            self._end(self._waited_for(stuck, gone))

    def _gone(self, stuck: Stuck) -> list[int]:
        return [rank for rank in stuck.missing if not self._processes[rank].is_running()]

    def _warn(self, stuck: Stuck) -> None:
        now = time.monotonic()
        if stuck.seconds > _WARN_EVERY_S and now - self._warned_at > _WARN_EVERY_S:
            self._warned_at = now
            logger.warning(
                "%s has waited %.0f s for %s exchange %d from rank %s, which is still running.",
                *(self._name(self._rank), stuck.seconds, stuck.wait.what, stuck.wait.number, _list(stuck.missing)),
            )

    def _dead(self) -> list[int]:
        others = (pair for pair in self._processes.items() if pair[0] != self._rank and pair[0] not in self._may_go)
        return [rank for rank, process in others if not process.is_running()]

    def _known(self) -> Failure | None:
        return None if self._board is None else self._board.failure

    # What is said.

    def _failure_of(self, error: BaseException) -> Failure:
        if isinstance(error, DistcaError):
            return Failure(
                rank=self._rank,
                kind=type(error).__name__,
                sentence=str(error),
                details=error.next_step,
                code=MISTAKE,
            )
        what = traceback.format_exception_only(error)[-1].strip()
        return Failure(
            rank=self._rank,
            kind=type(error).__name__,
            sentence=f"{self._name(self._rank)} failed in {self._doing} on {socket.gethostname()}: {what}",
            details="".join(traceback.format_exception(error)).rstrip(),
            code=1,
        )

    def _death_of(self, dead: list[int]) -> Failure:
        who = self._name(dead[0]) if len(dead) == 1 else self._names(dead)
        whose = f"process {_list(self._processes[rank].pid for rank in dead)} on {socket.gethostname()}"
        return self._lost(
            f"{who} died in {self._doing} ({whose}): killed from outside, out of memory, or by an error that it "
            "reported above."
        )

    def _loss_of(self, nodes: list[str]) -> Failure:
        ranks = self._ranks_of(nodes)
        hosts = sorted({self._hosts[rank] for rank in ranks})
        return self._lost(
            f"No sign of life from {self._names(ranks)} on {', '.join(hosts)} for {_LOST_S:.0f} s, in {self._doing}: "
            "the node or its network is gone."
        )

    def _ranks_of(self, nodes: list[str]) -> list[int]:
        return [rank for rank, process in self._processes.items() if process.space in nodes]

    def _loss_of_store(self, seconds: float) -> Failure:
        return self._lost(
            f"The store of torch.distributed on {os.environ.get('MASTER_ADDR', 'the node of rank 0')} has not answered "
            f"{self._name(self._rank).lower()} for {seconds:.0f} s, in {self._doing}: the node or its network is gone."
        )

    def _waited_for(self, stuck: Stuck, gone: list[int]) -> Failure:
        wait, ranks = stuck.wait, _list(gone)
        return Failure(
            rank=self._rank,
            kind="",
            sentence=f"Rank {self._rank} waits for {wait.what} exchange {wait.number} from rank {ranks}, which has "
            f"ended; so this rank ends too. Look at the log of rank {ranks} for the reason, and go on from the last "
            "checkpoint.",
            details="",
            code=EXIT_CODE,
        )

    def _lost(self, sentence: str) -> Failure:
        return Failure(
            rank=self._rank, kind="", sentence=sentence, details=f"All other ranks end too. {_GO_ON}", code=1
        )

    def _name(self, rank: int) -> str:
        return f"Rank {rank}" if self._pool is None else self._pool.name(rank)

    def _names(self, ranks: list[int]) -> str:
        homes = [rank for rank in ranks if self._pool is None or rank < self._pool.homes]
        words = [f"ranks {_list(homes)}"] if homes else []
        words += [self._name(rank) for rank in ranks if rank not in homes]
        return " and ".join(words)

    # How it ends.

    def _end(self, failure: Failure, kind: str = "") -> None:
        """Say what the run ends with, this failure or what was posted before, and end this process.

        Args:
            failure: what this rank found.
            kind: of its own error, if it failed.
        """
        with self._leaving:
            found = failure if self._board is None else self._board.post(failure)
            if found.rank == self._rank or not found.is_mistake or found.kind != kind:
                with suppress(OSError, ValueError):  # standard error may be closed, which must keep nobody alive
                    self._say(found)
                _flush()
            if self._board is not None:
                self._board.heard(sum(each.is_running() for each in self._processes.values()), _HEARD_S)
            self._give_up(found.code)

    def _say(self, failure: Failure) -> None:
        own = failure.rank == self._rank
        if failure.is_mistake and own:
            say_mistake(failure.sentence, failure.details)
        elif failure.is_mistake:
            logger.error("%s ended the run in %s: %s", self._name(failure.rank), self._doing, failure.sentence)
        else:
            logger.critical("%s\n%s", failure.sentence, failure.details)

    def _leave(self, code: int) -> None:
        with self._leaving:
            _flush()
            self._give_up(code)


def _store_of(pool: Members | None) -> dist.Store | None:
    return None if pool is None else pool.store


def watch_waits(group: dist.ProcessGroup, missing: Callable[[Wait], list[int]]) -> Waits:
    """Waits for peers in ``group`` that are watched from when they are noted: by what watches over this process's run
    already, or else by a watcher of their own. All ranks of the group call it together."""
    health = _of_process or Health(group, ends_with_ranks=False)
    return health.watch_waits(group, missing)


def _list(numbers: Any) -> str:
    return ", ".join(map(str, numbers))


def _flush() -> None:
    # A progress bar hides the cursor.
    flushes = [handler.flush for handler in logging.getLogger().handlers] + [lambda: console().show_cursor(True)]
    for flush in (*flushes, sys.stdout.flush, sys.stderr.flush):
        with suppress(OSError, ValueError):
            flush()


def _forget_signals(then: signal.Handlers = signal.SIG_DFL) -> None:
    """In a forked child: it shares the pipe, but what it is told does not concern this rank."""
    signal.set_wakeup_fd(-1)
    for number in _ENDING:
        signal.signal(number, then)
