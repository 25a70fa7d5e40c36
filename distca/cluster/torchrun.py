"""torchrun for the ranks of one node, with stores that nobody outside it can connect to.

``python -m distca.cluster.torchrun --standalone --nproc-per-node=4 program.py`` takes torchrun's arguments.
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend
from torch.distributed.run import main

from distca.cluster.store import LOOPBACK, LoopbackStore


def run(arguments: list[str]) -> None:
    """Start the ranks, with torchrun's arguments."""
    setattr(dist, "TCPStore", LoopbackStore)  # noqa: B010
    setattr(c10d_rendezvous_backend, "TCPStore", LoopbackStore)  # noqa: B010
    main([f"--local-addr={LOOPBACK}", *arguments])


if __name__ == "__main__":
    run(sys.argv[1:])
