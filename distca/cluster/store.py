"""torch.distributed's key-value store, listening on one network interface only.

torch's own store listens on all interfaces, and any process that reaches it can read and write the ranks' messages.
These stores listen on loopback if all ranks are on one node, else on the interface of MASTER_ADDR.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta

from torch.distributed import TCPStore

from distca.cluster.interface import LOOPBACK, on_one_node
from distca.errors import LaunchError


class InterfaceStore(TCPStore):
    """torch's TCPStore, listening on the interface with the address of its node. Arguments are TCPStore's.

    Args:
        host_name: name or address of the store's node, at which all ranks reach it.
        port: the store's port; 0 takes a free one.
        world_size: number of ranks; None if it is not known yet.
        is_master: whether this process holds the store.
        timeout: the longest time that a call waits.
        wait_for_workers: whether to wait here until all ranks have connected.
        multi_tenant: whether several stores of this process may share the port.

    Raises:
        LaunchError: this process cannot listen on the port.
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
            listener = _listen(host_name, port)
            port, descriptor = listener.getsockname()[1], listener.detach()
        super().__init__(
            host_name,
            port,
            world_size,
            is_master,
            timeout,
            wait_for_workers,
            multi_tenant,
            master_listen_fd=descriptor,
        )


class LoopbackStore(InterfaceStore):
    """torch's TCPStore on loopback, whatever ``host_name`` is: no process outside the node can connect to it."""

    def __init__(self, host_name: str, *others: object, **named: object) -> None:
        super().__init__(LOOPBACK, *others, **named)  # type: ignore[arg-type]


def own_store(
    rank: int, size: int, address: str, port: int, timeout: timedelta, environment: Mapping[str, str] = os.environ
) -> InterfaceStore | None:
    """Returns the ranks' store, which rank 0 holds; None if torchrun holds one already. All ranks call it together.

    Args:
        rank: this rank.
        size: number of ranks.
        address: name or address of rank 0's node.
        port: the port on that node.
        timeout: the longest time that a call of the store waits.
        environment: this process's environment variables.

    Raises:
        LaunchError: rank 0 cannot listen on the port.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    if on_one_node(size, environment):
        return LoopbackStore("", port, size, rank == 0, timeout)
    return InterfaceStore(address, port, size, rank == 0, timeout)


def _listen(host_name: str, port: int) -> socket.socket:
    """Returns a socket that listens on the node's address, or on all interfaces if the node has none of that name."""
    for family, address in _addresses(host_name):
        try:
            return socket.create_server((address, port), family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # the address may be that of a router in front of this node
                raise _occupied(host_name, port, error) from None
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, backlog=1024, dualstack_ipv6=both
        )
    except OSError as error:
        raise _occupied(host_name, port, error) from None


def _addresses(host_name: str) -> Iterator[tuple[int, str]]:
    """Yields families and addresses of a node's name.

    On many nodes the node's own name stands for a loopback address, at which other nodes cannot reach it. So loopback
    counts only if ``host_name`` is "localhost" or a loopback address itself."""
    try:
        given = ipaddress.ip_address(host_name)
    except ValueError:
        for family, _, _, _, place in socket.getaddrinfo(host_name, None, type=socket.SOCK_STREAM):
            if host_name == "localhost" or not ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
                yield family, str(place[0])
    else:
        yield (socket.AF_INET if given.version == 4 else socket.AF_INET6), host_name


def _occupied(host_name: str, port: int, error: OSError) -> LaunchError:
    """Returns the error that a port cannot be listened on."""
    return LaunchError(
        f"Rank 0 cannot listen on port {port} of {host_name} ({error.strerror}).",
        "set MASTER_PORT to a free port, alike for all ranks.",
    )
