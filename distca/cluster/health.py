"""Watches over the ranks of a run: when one fails, dies or is lost, all others report that and end within seconds.

Without it the other ranks would wait for the lost one: with NCCL in the driver, with gloo until a connection breaks,
with NVSHMEM forever. So a thread of every rank looks once a second at three things:

- the processes of its node, which may have died;
- the waits that CUDA streams have queued, which may never pass (:mod:`distca.cluster.waits`);
- the board in torch.distributed's store, with signs of life of other nodes and failures (:mod:`distca.cluster.board`).

The thread works while the main thread waits for a GPU or for other ranks. A rank ends by ``os._exit``. A proper end,
which closes process groups, would wait for the other ranks.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from distca.cluster.board import Board, Failure
from distca.cluster.failure_reports import FailureReports, listed
from distca.cluster.process import Member
from distca.cluster.waits import Stuck, Wait, Waits
from distca.errors import DistcaError, RefusedServerError
from distca.log import console

if TYPE_CHECKING:
    from distca.cluster.members import Members

logger = logging.getLogger(__name__)

_ENDING = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that schedulers and launchers send before they end a run."""
_PERIOD_S = 1.0
"""Seconds between two looks."""
_DEATH_S = 1.0
"""Seconds before a dead process is reported. Meanwhile the error of which it died may appear on the board."""
_FAILURE_S = 3.0
"""Seconds before this rank reports its own error. The error may follow from another rank's death, which is then found
and reported in its place."""
_MISTAKE_S = 3.0
"""Seconds before this rank repeats a mistake that another rank posted. It may find the mistake itself meanwhile."""
_HEARD_S = 4.0
"""The longest time in seconds that a rank waits, after its report, for the other ranks' reports. A launcher that sees a
rank end may kill the others before they have reported."""
_LOST_S = 40.0
"""Seconds without a sign of life after which a node counts as lost."""
_STARTING_S = 70.0
"""The same for a server without a model, until the pool has formed. A server that compiles a kernel may hold Python's
lock for a minute, and its signs of life wait meanwhile."""
_BROKEN_S = 5.0
"""Seconds after which a server without a model ends, if its connection to the store is closed: its homes are gone."""
_WAIT_GRACE_S = 4.0
"""Seconds before a rank ends because it waits for a rank that has ended. Other reports, which say more, come first."""
_WARN_EVERY_S = 60.0
"""Seconds of a wait after which a warning is logged, and seconds between two warnings."""

_of_process: Health | None = None
"""The watcher of this process, which :func:`watch_waits` uses; None without one."""


class Health:
    """Watches over the ranks of a group; they create it together, after torch.distributed is initialised.

    Args:
        group: the ranks that are watched; None for all ranks.
        ends_with_ranks: True ends this rank when any rank has died. False ends it only when a rank has died for which a
            queued wait of this rank waits.
        give_up: a function that ends this process with an exit code, whatever its threads are waiting for.
        pool: in runs with servers without a model, all ranks (called homes) and servers; they are watched in place of
            ``group``.

    Attributes:
        asked_by: the name of the signal that asked this rank to end, if all ranks could go on; empty without one. The
            caller saves and ends.
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
        hosts = {rank: each.host for rank, each in zip(ranks, everyone, strict=True)}
        self._reports = FailureReports(self._rank, hosts, pool)
        self._processes = {rank: each.process for rank, each in zip(ranks, everyone, strict=True)}
        # Homes stand for their nodes. Each server has signs of its own, as one of several on its machine may be killed.
        homes = len(everyone) if pool is None else pool.homes
        names = [str(each.process) if at >= homes else each.process.space for at, each in enumerate(everyone)]
        self._names_of_life = dict(zip(ranks, names, strict=True))
        self._may_go: set[int] = set()  # members whose end does not end this rank
        self.asked_by = ""
        self._stops_when_asked = False
        # The main thread and the watching one may find the same failure. The lock lets one of them report it in full.
        self._leaving = threading.Lock()
        self._waits: list[Waits] = []
        # The oldest wait of each that is for a rank that has ended, and when it was first seen.
        self._hopeless: dict[Waits, tuple[Wait, float]] = {}
        self._warned_at = 0.0
        self._stop = threading.Event()
        # Homes report a lost node to servers, which need not look for it.
        listens = pool is None or not pool.is_server
        self._board = Board(self._rank, names, _store_of(pool), listens=listens) if ends_with_ranks else None
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
        """The host names of servers without a model, in order."""
        return [] if self._pool is None else [each.host for each in self._pool.everyone[self._pool.homes :]]

    def doing(self, what: str) -> None:
        """Notes the present activity of this rank, such as "step 7", for reports of failures."""
        self._reports.doing = what

    def pool_has_formed(self) -> None:
        """Makes this rank outlive servers without a model from now on. Before, homes wait for each of them."""
        if self._pool is not None:
            self._may_go = self._pool.may_go

    def stops_when_asked(self) -> None:
        """Makes SIGTERM only set ``asked_by`` from now on, unless a rank has failed.

        SIGUSR1 always only sets ``asked_by``: schedulers send it some time before a run has to end."""
        self._stops_when_asked = True

    def watch_waits(self, group: dist.ProcessGroup, missing: Callable[[Wait], list[int]]) -> Waits:
        """Returns an object in which waits for ranks of ``group`` can be noted, and watches them from then on.

        ``missing`` is as in :class:`distca.cluster.waits.Waits`."""
        self._waits.append(Waits(dist.get_process_group_ranks(group), missing))
        return self._waits[-1]

    @contextmanager
    def ends_failures(self) -> Iterator[None]:
        """Ends all ranks if the ``with`` block raises an error, before a clean-up could wait for other ranks.

        Raises:
            RefusedServerError: the block raised it; other ranks go on.
        """
        try:
            yield
        except RefusedServerError:
            self.stop()
            raise
        except KeyboardInterrupt:
            self._leave(128 + signal.SIGINT)
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """Ends this rank and all others with an error, or with another rank's death that was its cause."""
        failure = self._reports.of_error(error)
        end = time.monotonic() + (0 if isinstance(error, DistcaError) else _FAILURE_S)
        while time.monotonic() < end and self._known() is None and not self._dead():
            time.sleep(0.1)
        dead = self._dead()
        self._end(self._death_of(dead) if dead and not isinstance(error, DistcaError) else failure, failure.kind)
        raise SystemExit(failure.code)  # reached only in tests, whose give_up does not end the process

    def part(self) -> None:
        """Ends the watch on all ranks, so that they may end one by one; all ranks call it together.

        Servers without a model are told to end."""
        dist.barrier()
        self.stop()
        dist.barrier()  # no rank ends while another one still watches
        if self._pool is not None:
            self._pool.let_servers_go()
        if threading.current_thread() is threading.main_thread():
            _forget_signals(signal.SIG_IGN)  # a scheduler may repeat them, when nothing is left to save

    def stop(self) -> None:
        """Ends the watch of this rank."""
        global _of_process
        self._stop.set()
        if self._board is not None:
            self._board.stop()
        self._thread.join(5)
        if _of_process is self:
            _of_process = None

    def _hear_signals(self) -> None:
        """Makes the watching thread receive signals at once, through a pipe.

        Python runs signal handlers in the main thread, and that may be waiting inside a library."""
        if threading.current_thread() is not threading.main_thread():
            return
        os.set_blocking(self._woken, False)
        for number in _ENDING:
            signal.signal(number, lambda *_: None)  # the watching thread acts on it
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
        """Returns the signals that came within ``seconds``. SIGINT ends the watch: all ranks get it, and need no
        report."""
        if not select.select([self._wake], [], [], seconds)[0]:
            return b""
        signals = os.read(self._wake, 4096)
        if signal.SIGINT in signals:
            self._stop.set()
        return signals

    def _look_at_ranks(self, told: signal.Signals | None) -> None:
        """Ends this process if the board, a process, a node or the signal ``told`` is a reason for it."""
        board, pool = self._board, self._pool
        assert board is not None
        if pool is not None and pool.is_server and board.silence() < _BROKEN_S and _is_over(pool, board):
            self._leave(0)  # this is a server that homes have let go; it has nothing to save
        if told is not None or self._dead():
            self._wait_for(lambda: board.failure is not None or (told is not None and bool(self._dead())), _DEATH_S)
        if board.failure is not None:
            if board.failure.is_mistake:
                self._stop.wait(_MISTAKE_S)
            self._end(board.failure)
        elif dead := self._dead():
            self._end(self._death_of(dead))
        elif lost := self._silent(board):
            self._end(self._reports.of_silence(*lost))
        elif board.silence() > _LOST_S or (pool is not None and pool.is_server and board.broken >= _BROKEN_S):
            self._end(self._reports.of_silent_store(board.silence()))
        elif told is not None and (self._stops_when_asked or told == signal.SIGUSR1):
            # Only the first signal counts, as a scheduler and a launcher may each send one.
            self.asked_by = self.asked_by or told.name
        elif told is not None:
            self._leave(128 + told)

    def _silent(self, board: Board) -> tuple[list[int], float] | None:
        """Returns ranks that may not go and gave no sign of life, and for how many seconds; None if all are heard."""
        may_be_late = set() if self._pool is None else self._pool.may_go
        for seconds, excused in ((_LOST_S, may_be_late), (_STARTING_S, self._may_go)):
            names = board.silent(seconds)
            lost = [rank for rank, name in self._names_of_life.items() if name in names and rank not in excused]
            if lost:
                return lost, seconds
        return None

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
            # The look at ranks, which goes on meanwhile, reports the death with more details, if it is on. And a rank
            # that ended properly has sent its rows before, so the wait will pass. GPUs may not answer each look.
            now = time.monotonic()
            wait, since = self._hopeless.get(waits, (None, now))
            if wait is not stuck.wait:  # an earlier one has passed
                since = now
            self._hopeless[waits] = stuck.wait, since
            if now - since >= _WAIT_GRACE_S:
                self._end(self._reports.of_wait(stuck, gone))

    def _gone(self, stuck: Stuck) -> list[int]:
        return [rank for rank in stuck.missing if not self._processes[rank].is_running()]

    def _warn(self, stuck: Stuck) -> None:
        now = time.monotonic()
        if stuck.seconds > _WARN_EVERY_S and now - self._warned_at > _WARN_EVERY_S:
            self._warned_at = now
            logger.warning(
                "%s has waited %.0f s for %s exchange %d from rank %s, which is still running.",
                *(self._reports.name(self._rank), stuck.seconds, stuck.wait.what, stuck.wait.number),
                listed(stuck.missing),
            )

    def _dead(self) -> list[int]:
        others = (pair for pair in self._processes.items() if pair[0] != self._rank and pair[0] not in self._may_go)
        return [rank for rank, process in others if not process.is_running()]

    def _death_of(self, dead: list[int]) -> Failure:
        return self._reports.of_death({rank: self._processes[rank].pid for rank in dead})

    def _known(self) -> Failure | None:
        return None if self._board is None else self._board.failure

    # The end of the process.

    def _end(self, failure: Failure, kind: str = "") -> None:
        """Reports the failure that ends the run and ends this process.

        Args:
            failure: the failure that this rank found; a failure that was posted before takes its place.
            kind: the class name of this rank's own error, if it failed.
        """
        with self._leaving:
            found = failure if self._board is None else self._board.post(failure)
            if found.rank == self._rank or not found.is_mistake or found.kind != kind:
                with suppress(OSError, ValueError):  # standard error may be closed; the process ends nevertheless
                    self._reports.say(found)
                _flush()
            if self._board is not None:
                self._board.heard(sum(each.is_running() for each in self._processes.values()), _HEARD_S)
            self._give_up(found.code)

    def _leave(self, code: int) -> None:
        with self._leaving:
            _flush()
            self._give_up(code)


def _is_over(pool: Members, board: Board) -> bool:
    """Whether homes have let their servers go. A store on a lost node never answers; then it is False."""
    said: list[bool] = []
    board.within(_PERIOD_S, lambda: said.append(pool.is_over()))
    return said == [True]


def _store_of(pool: Members | None) -> dist.Store | None:
    return None if pool is None else pool.store


def watch_waits(group: dist.ProcessGroup, missing: Callable[[Wait], list[int]]) -> Waits:
    """Returns an object in which waits for ranks of ``group`` can be noted; all ranks of the group call it together.

    The process's watcher watches these waits. If there is none, one is created, which ends this rank only for a rank
    that such a wait needs. ``missing`` is as in :class:`distca.cluster.waits.Waits`."""
    health = _of_process or Health(group, ends_with_ranks=False)
    return health.watch_waits(group, missing)


@contextmanager
def ends_by(seconds: float, error: DistcaError) -> Iterator[None]:
    """Ends all ranks with ``error`` if the ``with`` block takes longer than ``seconds``.

    It is for waits inside libraries, which nothing else can end. Without a watcher of this process it does nothing."""
    done = threading.Event()

    def watch() -> None:
        if not done.wait(seconds) and _of_process is not None:
            _of_process.fail(error)

    threading.Thread(target=watch, name="distca-limit", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _flush() -> None:
    # The cursor is shown again, as a progress bar hides it.
    flushes = [handler.flush for handler in logging.getLogger().handlers] + [lambda: console().show_cursor(True)]
    for flush in (*flushes, sys.stdout.flush, sys.stderr.flush):
        with suppress(OSError, ValueError):
            flush()


def _forget_signals(then: signal.Handlers = signal.SIG_DFL) -> None:
    """Sets the handlers of the ending signals to ``then``, and no longer writes signals to the pipe.

    A forked child calls it: it shares the pipe with this rank, but its signals do not concern this rank."""
    signal.set_wakeup_fd(-1)
    for number in _ENDING:
        signal.signal(number, then)
