"""A store of torch.distributed for the ranks of one node: nobody outside that node can connect to it.

torch's own listens on every interface, and whoever reaches it can read and write what ranks tell each other.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"


class LoopbackStore(TCPStore):
    """torch's store, on the loopback interface.

    Args:
        host_name: of the node; unused.
        port: of the store; 0 takes a free one.
        world_size: ranks; None where that is not known yet.
        is_master: this process keeps the store.
        timeout: of what waits for it.
        wait_for_workers: until all ranks have come.
        multi_tenant: several stores of this process may share the port.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = timedelta(seconds=300),
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
    ) -> None:
        descriptor = None
        if is_master:
            listener = socket.create_server((LOOPBACK, port), backlog=1024)
            port, descriptor = listener.getsockname()[1], listener.detach()
        super().__init__(
            LOOPBACK, port, world_size, is_master, timeout, wait_for_workers, multi_tenant, master_listen_fd=descriptor
        )


def own_store_of_one_node(
    rank: int, size: int, port: int, timeout: timedelta, environment: Mapping[str, str] = os.environ
) -> LoopbackStore | None:
    """The store of ranks that all are on this node and that no launcher keeps one for; None for others."""
    one_node = size == 1 or environment.get("LOCAL_WORLD_SIZE") == str(size)
    if not one_node or environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return LoopbackStore("", port, size, rank == 0, timeout)
