"""Nodes whose Python programs are forked from a process that has imported Megatron-Core already.

In programs that are started by themselves, as :mod:`distca.testing.nodes` does, imports take most of a test's time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from distca.testing.nodes import INTERFACE, Nodes
from tests.testing.programs import Program, run_program

# Of Linux's sched.h, mount.h and prctl.h.
_NEW_MOUNTS, _NEW_NAME, _NEW_PROCESSES, _NEW_NETWORK = 0x0002_0000, 0x0400_0000, 0x2000_0000, 0x4000_0000
_RECURSIVE, _PRIVATE, _PARENT_DEATH_SIGNAL = 0x4000, 0x4_0000, 1


class ForkedNodes(Nodes):
    """Nodes that run Python programs only."""

    def start(  # type: ignore[override]
        self,
        node: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdout: IO[Any] | None = None,
        stderr: IO[Any] | int | None = None,
        cwd: str | Path | None = None,
        preexec_fn: Callable[[], object] | None = None,
    ) -> Program:
        """Runs a program on a node; the other arguments are those of Popen."""
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, **environment}
        if stderr == subprocess.STDOUT:
            stderr = stdout
        assert not isinstance(stderr, int)
        place = _Place(f"/run/netns/{self._space(node)}", self.names[node], preexec_fn)
        program = Program(command, variables, cwd, stdout, stderr, target=place.run)
        self._running.append(program)  # type: ignore[arg-type]
        return program


class _Place:
    """A node, for a process that is to run on it."""

    def __init__(self, network: str, name: str, begin: Callable[[], object] | None) -> None:
        self._network, self._name, self._begin = network, name, begin

    def run(self, *program: Any) -> None:
        """Runs a program as the first process of the node, and ends with its exit code."""
        with open(self._network) as network:
            _call("setns", network.fileno(), _NEW_NETWORK)
        _call("unshare", _NEW_NAME | _NEW_PROCESSES | _NEW_MOUNTS)  # the new processes are those forked from now on
        first = os.fork()
        if first:
            _, status = os.waitpid(first, 0)
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        _call("prctl", _PARENT_DEATH_SIGNAL, signal.SIGKILL)
        _call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)
        _call("mount", b"proc", b"/proc", b"proc", 0, None)
        socket.sethostname(self._name)
        if self._begin is not None:
            self._begin()
        run_program(*program)


def _call(name: str, *arguments: Any) -> None:
    """Calls a function of the C library.

    Raises:
        OSError: it failed.
    """
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
