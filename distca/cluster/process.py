"""Whether a process that another rank named still exists."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from distca.cluster.hostname import machine_name


@dataclass(frozen=True)
class Process:
    """A rank's process.

    Attributes:
        pid: its id.
        space: where that id means something; nodes and containers have spaces of their own.
        started: clock ticks from the node's boot to its start, which no change of the clock moves; with it a later
            process of the same id is another one.
    """

    pid: int
    space: str
    started: int

    @staticmethod
    def here() -> Process:
        """This one."""
        _, started = _state_and_start(os.getpid()) or ("R", 0)
        return Process(os.getpid(), _space(), started)

    def is_running(self) -> bool:
        """Whether it exists and is no zombie; taken for running where that cannot be seen from here."""
        if self.space != _space():
            return True
        try:
            found = _state_and_start(self.pid)
        except OSError:
            return True
        return found is not None and found[0] not in "ZX" and found[1] == self.started


@dataclass(frozen=True)
class Member:
    """A process of the run.

    Attributes:
        host: name of its node.
        process: its own.
    """

    host: str
    process: Process

    @staticmethod
    def here() -> Member:
        """This process."""
        return Member(socket.gethostname(), Process.here())


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """Fields 3 and 22 of its line in /proc; None where there is no such process."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return words[0], int(words[19])


def _space() -> str:
    """Its name says the node as well: the first space has the same number on every one."""
    try:
        return f"{machine_name()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return machine_name()
