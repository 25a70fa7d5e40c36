"""Starts the servers without a model of one machine, a process each; pretrain_llama.sh runs it.

``python -m distca.cluster.server_processes FIRST COUNT GPU SHARING program...`` starts COUNT servers with the numbers
FIRST, FIRST + 1 and so on. They get the GPUs number GPU, GPU + 1 and so on, SHARING servers each. It ends when all
servers have ended, with the largest of their exit codes. A server that a signal has killed counts as 0, as the run goes
on without it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
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

    signal.signal(signal.SIGTERM, pass_on)
    for place in range(count):
        variables = {"SERVER": str(first + place), "LOCAL_RANK": str(gpu + place // sharing)}
        servers.append(subprocess.Popen(program, env=os.environ | variables, preexec_fn=end_with_parent))
    return max(max(server.wait(), 0) for server in servers)


if __name__ == "__main__":
    raise SystemExit(run(*map(int, sys.argv[1:5]), sys.argv[5:]))  # type: ignore[call-arg,arg-type]
