"""Nodes on one machine, for tests of what networks do: each has a host name, process ids and a network of its own.

They are Linux namespaces on a bridge, with links of a given bandwidth that can be cut. That takes root and the programs
``ip``, ``tc`` and ``unshare``; :func:`why_not` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

INTERFACE = "eth0"


def why_not() -> str | None:
    """Why there can be no such nodes here, or None."""
    missing = [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]
    if missing:
        return f"there is no {missing[0]}"
    if os.geteuid() != 0:
        return "namespaces need root"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--pid", "--fork", "--mount-proc", "true"], capture_output=True
    )
    return None if tried.returncode == 0 else f"namespaces are refused: {tried.stderr.decode().strip()}"


class Nodes:
    """Nodes while the context is entered; leaving it ends what runs on them.

    Args:
        number: of them; they are called node0, node1, ...
        megabits: bandwidth of each node's link, both ways, in Mbit/s; None leaves it unlimited.
    """

    def __init__(self, number: int, megabits: int | None = None) -> None:
        self.names = [f"node{number}" for number in range(number)]
        self._prefix = f"distca{os.getpid()}"
        self._bridge = f"dc{os.getpid() % 10**6}"
        self._megabits = megabits
        self._running: list[subprocess.Popen[Any]] = []

    def address(self, node: int) -> str:
        """The address of a node."""
        return f"10.213.{os.getpid() % 256}.{node + 1}"

    def __enter__(self) -> Nodes:
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("link", "set", self._bridge, "up")
            for node in range(len(self.names)):
                self._add(node)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def start(
        self, node: int, command: Sequence[str], environment: Mapping[str, str], **others: Any
    ) -> subprocess.Popen[Any]:
        """Run a command on a node; ``others`` go to Popen."""
        words = ["ip", "netns", "exec", self._space(node), "unshare", "--uts", "--pid", "--fork", "--mount-proc"]
        words += ["--kill-child", "sh", "-c", 'hostname "$0" && exec "$@"', self.names[node], *command]
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, **environment}
        self._running.append(subprocess.Popen(words, env=variables, **others))
        return self._running[-1]

    def cut(self, node: int) -> None:
        """Let nothing pass a node's link any more; nobody is told."""
        _ip("link", "set", self._outside(node), "down")

    def join(self, node: int) -> None:
        """Undo :meth:`cut`."""
        _ip("link", "set", self._outside(node), "up")

    def _add(self, node: int) -> None:
        space, outside, inside = self._space(node), self._outside(node), f"{self._outside(node)}i"
        _ip("netns", "add", space)
        _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
        _ip("link", "set", inside, "netns", space, "name", INTERFACE)
        _ip("link", "set", outside, "master", self._bridge, "up")
        _ip("-n", space, "address", "add", f"{self.address(node)}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            _ip("-n", space, "link", "set", interface, "up")
        if self._megabits is not None:
            limit = ["root", "tbf", "rate", f"{self._megabits}mbit", "burst", "64k", "latency", "50ms"]
            _run("tc", "qdisc", "add", "dev", outside, *limit)
            _run("tc", "-n", space, "qdisc", "add", "dev", INTERFACE, *limit)

    def _remove(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()
        for node in range(len(self.names)):
            # The kernel removes a space later, and the links in it, whose names the next nodes of this process take.
            for words in (("link", "delete", self._outside(node)), ("netns", "delete", self._space(node))):
                with suppress(subprocess.CalledProcessError):
                    _ip(*words)
        with suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self._bridge)

    def _space(self, node: int) -> str:
        return f"{self._prefix}-{node}"

    def _outside(self, node: int) -> str:
        return f"{self._bridge}n{node}"


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
