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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from distca.cluster.process import end_with_parent


def run(first: int, count: int, gpu: int, sharing: int, program: Sequence[str]) -> int:
    """Starts servers and waits until they have ended; returns the largest exit code.

    The first SIGTERM is passed on to the servers. A server at work goes on nevertheless, until its run is over. The
    second SIGTERM kills the servers.
    """
    servers: list[subprocess.Popen[bytes]] = []
    told = 0

    def pass_on(number: int, _: FrameType | None) -> None:
        nonlocal told
        told += 1
        for server in servers:
            server.send_signal(number if told == 1 else signal.SIGKILL)

    def outcome(place: int, met: Path) -> int:
        code = servers[place].wait()
        if code and not told and not met.exists():
            _tell_homes(first + place, code)
        return max(code, 0)

    signal.signal(signal.SIGTERM, pass_on)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(count) as threads:
        met = [Path(folder) / str(place) for place in range(count)]
        for place in range(count):
            variables = {"SERVER": str(first + place), "LOCAL_RANK": str(gpu + place // sharing)}
            environment = os.environ | variables | {"SERVER_MET": str(met[place])}
            servers.append(subprocess.Popen(program, env=environment, preexec_fn=end_with_parent))
        return max(threads.map(outcome, range(count), met))


def _tell_homes(number: int, code: int) -> None:
    from torch.distributed import DistError, TCPStore  # torch takes seconds, and few runs get here

    from distca.cluster.environment import served
    from distca.cluster.interface import LOOPBACK, pool_on_one_node
    from distca.cluster.members import MEETING, tell_of_end

    place = served(os.environ | {"SERVER": str(number)})
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    try:
        address = LOOPBACK if pool_on_one_node() else place.address
        store = TCPStore(address, place.port, is_master=False, timeout=MEETING)
        tell_of_end(store, number, f"on {socket.gethostname()} {how}")
    except DistError as error:
        sys.stderr.write(f"Server {number} {how}, and its homes could not be told: {error}\n")


if __name__ == "__main__":
    raise SystemExit(run(*map(int, sys.argv[1:5]), sys.argv[5:]))  # type: ignore[call-arg,arg-type]
