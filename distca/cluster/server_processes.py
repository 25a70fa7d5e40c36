"""Starts the servers without a model of one machine, a process each; pretrain_llama.sh runs it.

``python -m distca.cluster.server_processes FIRST COUNT GPU SHARING program...`` starts COUNT servers with the numbers
FIRST, FIRST + 1 and so on. They get the GPUs number GPU, GPU + 1 and so on, SHARING servers each. It ends when all
servers have ended, with the largest of their exit codes. A server that a signal has killed counts as 0, as the run goes
on without it. But homes wait for servers to come, and so are told of one that has ended before.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from distca.cluster.process import end_with_parent

_LOOK_S = 1.0
"""Seconds of a look for the homes' store, and between two looks. No signal interrupts a look."""


def run(first: int, count: int, gpu: int, sharing: int, program: Sequence[str]) -> int:
    """Starts servers and waits until they have ended; returns the largest exit code.

    The first SIGTERM is passed on to the servers. A server at work goes on nevertheless, until its run is over. The
    second SIGTERM kills the servers.
    """
    servers: list[subprocess.Popen[bytes]] = []
    told, started = 0, time.monotonic()

    def pass_on(number: int, _: FrameType | None) -> None:
        nonlocal told
        told += 1
        for server in servers:
            server.send_signal(number if told == 1 else signal.SIGKILL)

    def outcome(place: int, met: Path) -> int:
        code = servers[place].wait()
        if code and not met.exists():
            _tell_homes(first + place, code, started, lambda: bool(told))
        return max(code, 0)

    signal.signal(signal.SIGTERM, pass_on)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(count) as threads:
        met = [Path(folder) / str(place) for place in range(count)]
        for place in range(count):
            variables = {"SERVER": str(first + place), "LOCAL_RANK": str(gpu + place // sharing)}
            environment = os.environ | variables | {"SERVER_MET": str(met[place])}
            servers.append(subprocess.Popen(program, env=environment, preexec_fn=end_with_parent))
        return max(threads.map(outcome, range(count), met))


def _tell_homes(number: int, code: int, started: float, is_told_to_end: Callable[[], bool]) -> None:
    """Tells homes of a server's end once their store is there, within the time in which they wait for servers."""
    from torch.distributed import DistError, TCPStore  # torch takes seconds, and few runs get here

    from distca.cluster.environment import served
    from distca.cluster.interface import LOOPBACK, pool_on_one_node
    from distca.cluster.members import MEETING, tell_of_end
    from distca.errors import LaunchError

    try:
        place = served(os.environ | {"SERVER": str(number)})
    except LaunchError:
        return  # the server itself has said what is wrong
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    address = LOOPBACK if pool_on_one_node() else place.address
    # torch would log each vain attempt to reach a store that is not there yet.
    while not listens(address, place.port):
        if is_told_to_end() or time.monotonic() - started > MEETING.total_seconds():
            return
        time.sleep(_LOOK_S)
    try:
        store = TCPStore(address, place.port, is_master=False)
        tell_of_end(store, number, f"on {socket.gethostname()} {how}")
    except DistError as error:
        sys.stderr.write(f"Server {number} {how}, and its homes could not be told: {error}\n")


def listens(address: str, port: int) -> bool:
    """Whether a process accepts connections there."""
    try:
        socket.create_connection((address, port), _LOOK_S).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(run(*map(int, sys.argv[1:5]), sys.argv[5:]))  # type: ignore[call-arg,arg-type]
