"""A server without a model beside a run of the trainer: ``python -m distca.train.run.serve``, which launchers start.

SERVER is its number among the run's servers, LOCAL_RANK that of its GPU on this node. MASTER_ADDR and MASTER_PORT are
those of the homes. It needs no settings: homes say what they compute, and when it ends.
"""

from __future__ import annotations

import os
import threading
from typing import Any, NoReturn

import torch
from torch.distributed import DistError, TCPStore

from distca import serve
from distca.attention import AttentionSpec, Kernel
from distca.cluster.environment import ServerPlace, check_gpus_usable, gpu_of, served
from distca.cluster.health import Health
from distca.cluster.interface import LOOPBACK, pool_on_one_node
from distca.cluster.members import Members
from distca.cluster.process import end_with_parent
from distca.cluster.server_processes import listens
from distca.cluster.timeout import TIMEOUT
from distca.device.host_memory import keep_freed_memory
from distca.errors import DistcaError, LaunchError
from distca.log import die, setup_logging
from distca.runtime.attention_server import HOMES_QUIET


def main() -> NoReturn:
    """Serve until the homes' run is over. An error ends this server and the homes; one that only keeps it from joining
    their run ends this server alone."""
    end_with_parent()
    # As homes do, whose shapes differ from step to step as well.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    try:
        health = _serve()
    except DistcaError as error:
        die(str(error), error.next_step, everywhere=True)
    del health
    threading.Event().wait()  # the thread that watches over the run ends this process
    raise AssertionError


def _serve() -> Health:
    place = served()
    setup_logging(1, f"server {place.number}")
    check_gpus_usable(torch.cuda.is_available(), torch.__version__)
    if torch.cuda.is_available():
        torch.cuda.set_device(gpu_of(place.local_rank, torch.cuda.device_count()))
    else:
        keep_freed_memory()
    store = _store(place)
    health = Health(pool=Members.of_server(store, place.number))
    health.stops_when_asked()  # homes are told too: they finish their step, and let their servers go
    health.pool_has_formed()  # homes see to it that all are there
    health.doing("serving")
    with health.ends_failures():
        serve(store, place.number, patience=HOMES_QUIET, measure=_measured)
    return health


def _store(place: ServerPlace) -> TCPStore:
    """Returns the homes' store.

    Raises:
        LaunchError: nothing answers there for ``TIMEOUT``.
    """
    address = _address(place)
    try:
        return TCPStore(address, place.port, is_master=False, timeout=TIMEOUT)
    except DistError as error:
        raise LaunchError(
            f"No homes answered at port {place.port} (MASTER_PORT) of {address} in {TIMEOUT.total_seconds():.0f} s.",
            f"start homes with servers, and look whether they run (MASTER_ADDR is {place.address}).",
        ) from error


def _address(place: ServerPlace) -> str:
    """Returns the address at which the homes' store listens: loopback only, if all homes and servers are on one
    machine."""
    # Launchers set POOL_NODES. A server that is started by hand during the run has MASTER_ADDR alone.
    if "POOL_NODES" not in os.environ and listens(place.address, place.port):
        return place.address
    return LOOPBACK if pool_on_one_node() else place.address


def _measured(kernel: Kernel, spec: AttentionSpec) -> dict[str, Any]:
    from distca.train.run.measured_costs import measured_attention  # few runs need it

    return measured_attention(kernel, spec)


if __name__ == "__main__":
    main()
