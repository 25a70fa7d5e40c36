"""Stores of torch.distributed that listen where the ranks are: for one node on loopback, for several on the interface
of MASTER_ADDR.

torch's own listens on every interface, and whoever reaches it can read and write what ranks tell each other.
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
    """torch's store, on the interface that has the address of its node.

    Args:
        host_name: name or address of the node, at which all ranks find it.
        port: of the store; 0 takes a free one.
        world_size: ranks; None where that is not known yet.
        is_master: this process keeps the store.
        timeout: of what waits for it.
        wait_for_workers: until all ranks have come.
        multi_tenant: several stores of this process may share the port.

    Raises:
        LaunchError: the port cannot be listened on.
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
    """torch's store for the ranks of one node, whatever its name: nobody outside can connect to it."""

    def __init__(self, host_name: str, *others: object, **named: object) -> None:
        super().__init__(LOOPBACK, *others, **named)  # type: ignore[arg-type]


def own_store(
    rank: int, size: int, address: str, port: int, timeout: timedelta, environment: Mapping[str, str] = os.environ
) -> InterfaceStore | None:
    """The store of ranks that no launcher keeps one for; None for others. Every rank calls it together.

    Raises:
        LaunchError: rank 0 cannot listen on the port.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    if on_one_node(size, environment):
        return LoopbackStore("", port, size, rank == 0, timeout)
    return InterfaceStore(address, port, size, rank == 0, timeout)


def _listen(host_name: str, port: int) -> socket.socket:
    """A socket on the node's own address; on every interface where the name leads to none that others could reach."""
    for family, address in _addresses(host_name):
        try:
            return socket.create_server((address, port), family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # such as that of a router in front of this node
                raise _occupied(host_name, port, error) from None
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, backlog=1024, dualstack_ipv6=both
        )
    except OSError as error:
        raise _occupied(host_name, port, error) from None


def _addresses(host_name: str) -> Iterator[tuple[int, str]]:
    """Families and addresses of a node. Many nodes call themselves by a loopback address, at which others would look
    for it on themselves: that counts only where it was given as such."""
    try:
        given = ipaddress.ip_address(host_name)
    except ValueError:
        for family, _, _, _, place in socket.getaddrinfo(host_name, None, type=socket.SOCK_STREAM):
            if host_name == "localhost" or not ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
                yield family, str(place[0])
    else:
        yield (socket.AF_INET if given.version == 4 else socket.AF_INET6), host_name


def _occupied(host_name: str, port: int, error: OSError) -> LaunchError:
    return LaunchError(
        f"Rank 0 cannot listen on port {port} of {host_name} ({error.strerror}).",
        "set MASTER_PORT to a free port, alike for all ranks.",
    )
