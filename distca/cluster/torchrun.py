"""torchrun with two changes.

Its stores listen on loopback, for one node, or on the interface of MASTER_ADDR. And when a rank has failed, other ranks
that cannot end themselves are soon ended.

``python -m distca.cluster.torchrun --standalone --nproc-per-node=4 program.py`` takes torchrun's arguments.
"""

from __future__ import annotations

import logging
import signal
import sys

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, static_tcp_rendezvous
from torch.distributed.run import main

from distca.cluster.store import LOOPBACK, InterfaceStore, LoopbackStore
from distca.errors import LaunchError
from distca.log import MISTAKE, die

STOP_S = 3
"""From the end of a rank that failed until the others are killed. They have had seconds to end with its words."""
_torchs_close = PContext.close


def run(arguments: list[str]) -> None:
    """Start the ranks, with torchrun's arguments. A signal ends them and this process, with a shell's exit code of
    it: who sent it knows why, and torchrun's own trace would hide what ranks said. Of ranks that failed, its table of
    them is shown, but not below a mistake's sentence, which says it all."""
    one_node = "--standalone" in arguments
    for module in (dist, c10d_rendezvous_backend, static_tcp_rendezvous):
        setattr(module, "TCPStore", LoopbackStore if one_node else InterfaceStore)  # noqa: B010
    PContext.close = _close  # type: ignore[assignment,method-assign]
    logging.getLogger(PContext.__module__).setLevel(logging.CRITICAL)  # of each rank that it ends
    try:
        main([f"--local-addr={LOOPBACK}", *arguments] if one_node else arguments)
    except SignalException as ended:
        raise SystemExit(128 + ended.sigval) from None
    except ChildFailedError as failed:
        if failed.get_first_failure()[1].exitcode == MISTAKE:
            raise SystemExit(MISTAKE) from None
        sys.stderr.write(f"{failed}\n")
        raise SystemExit(1) from None
    except LaunchError as error:
        die(error, everywhere=True)


def _close(ranks: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
    """End ranks; without a signal because one of them has failed."""
    _torchs_close(ranks, death_sig, STOP_S if death_sig is None else timeout)


if __name__ == "__main__":
    run(sys.argv[1:])
