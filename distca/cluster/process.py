"""Identifies processes and machines: whether another rank's process still exists, and ending with one's parent."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
"""The operation of Linux' prctl that asks for a signal when the parent ends."""


def machine_name() -> str:
    """Returns a name that no other machine has: host name and boot id.

    Host names alone are the same on machines that were started from one image."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text().strip() if boot.is_file() else "")


def end_with_parent() -> None:
    """Makes the system send SIGTERM to this process when the thread that started it ends, even if it is killed.

    On other systems than Linux nothing happens. It may be called between fork and exec."""
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_with_torchrun(environment: Mapping[str, str] = os.environ) -> None:
    """Calls :func:`end_with_parent` if torchrun started this process.

    A thread of torchrun starts ranks and waits until they end. Of other launchers that is not known."""
    if "TORCHELASTIC_RUN_ID" in environment:
        end_with_parent()


@dataclass(frozen=True)
class Process:
    """A process, identified so that a later process with the same id is another one.

    Attributes:
        pid: the process id.
        space: the machine and the container in which the id is valid.
        started: clock ticks from the machine's boot to the start of the process. Setting the clock does not change it.
    """

    pid: int
    space: str
    started: int

    @staticmethod
    def here() -> Process:
        """Returns this process."""
        _, started = _state_and_start(os.getpid()) or ("R", 0)
        return Process(os.getpid(), _space(), started)

    def is_running(self) -> bool:
        """Whether the process exists and is no zombie. True for a process on another machine or in another container,
        as that cannot be seen from here."""
        if self.space != _space():
            return True
        try:
            found = _state_and_start(self.pid)
        except OSError:
            return True
        return found is not None and found[0] not in "ZX" and found[1] == self.started


@dataclass(frozen=True)
class Member:
    """A process of a run, with its host.

    Attributes:
        host: the host name of its node, for messages.
        process: the process.
    """

    host: str
    process: Process

    @staticmethod
    def here() -> Member:
        """Returns this process with its host."""
        return Member(socket.gethostname(), Process.here())


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """Returns state and start of a process, fields 3 and 22 of /proc/PID/stat; None if there is no such process."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return words[0], int(words[19])


def _space() -> str:
    """Returns the machine and the number of its namespace of process ids; the latter alone is equal on all machines."""
    try:
        return f"{machine_name()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return machine_name()
