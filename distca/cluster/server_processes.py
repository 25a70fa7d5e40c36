"""The servers without a model of one machine: a process each, which live and end each by itself.

``python -m distca.cluster.server_processes FIRST COUNT GPU program...`` starts servers FIRST, FIRST + 1 ..., of which
the first gets GPU number GPU. It ends when all have, with the largest of their exit codes. One that was killed does not
count: homes go on without it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from distca.cluster.parent import end_with_parent


def run(first: int, count: int, gpu: int, program: Sequence[str]) -> int:
    """Start servers and wait until they have ended; returns the exit code.

    SIGTERM is passed on. A server that is at work goes on nevertheless, until its homes let it go; a second signal ends
    it.
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
        variables = {"SERVER": str(first + place), "LOCAL_RANK": str(gpu + place)}
        servers.append(subprocess.Popen(program, env=os.environ | variables, preexec_fn=end_with_parent))
    return max(max(server.wait(), 0) for server in servers)


if __name__ == "__main__":
    raise SystemExit(run(*map(int, sys.argv[1:4]), sys.argv[4:]))  # type: ignore[call-arg,arg-type]
