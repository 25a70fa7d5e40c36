"""torchrun with two changes; ``python -m distca.cluster.torchrun`` takes torchrun's arguments.

Its key-value stores listen on loopback with ``--standalone``, else on the interface of MASTER_ADDR. When a rank has
failed, the other ranks get a few seconds to end, and are then killed.
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
"""Seconds from the end of a rank that failed until the other ranks are killed. They had seconds before: a failing rank
waits until the others have reported its failure."""
_torchs_close = PContext.close


def run(arguments: list[str]) -> None:
    """Starts the ranks, with torchrun's arguments.

    After a signal this process ends with the signal's exit code, 128 and its number, without torchrun's traceback. If a
    rank has failed, torchrun's table of failures is shown. After a user's mistake it is not, as ranks have shown a
    sentence."""
    one_node = "--standalone" in arguments
    for module in (dist, c10d_rendezvous_backend, static_tcp_rendezvous):
        setattr(module, "TCPStore", LoopbackStore if one_node else InterfaceStore)  # noqa: B010
    PContext.close = _close  # type: ignore[assignment,method-assign]
    logging.getLogger(PContext.__module__).setLevel(logging.CRITICAL)  # it would log each rank that is killed
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
    """Ends the ranks in place of torchrun's method. No signal is given if a rank has failed."""
    _torchs_close(ranks, death_sig, STOP_S if death_sig is None else timeout)


if __name__ == "__main__":
    run(sys.argv[1:])
