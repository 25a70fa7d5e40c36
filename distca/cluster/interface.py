"""The network interface on which gloo's process groups listen. On one node it is loopback, on several the one that
leads to MASTER_ADDR.

By itself gloo takes the interface that the host's name leads to, which others outside the run may reach.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping

import psutil

LOOPBACK = "127.0.0.1"
_VARIABLE = "GLOO_SOCKET_IFNAME"
_ANY_PORT = 9
"""Nothing is sent to it: the system is only asked for the way to an address."""

_chosen: str | None = None


def on_one_node(size: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher says that all ranks are on this node, and all servers without a model too."""
    here = size == 1 or environment.get("LOCAL_WORLD_SIZE") == str(size)
    return here and pool_on_one_node(environment)


def pool_on_one_node(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher says that servers without a model are on the node of the ranks; also without any."""
    return environment.get("POOL_NODES", "1") == "1"


def bind_gloo(address: str = LOOPBACK) -> None:
    """Let process groups of this process that are made from now on listen on one interface. A variable that the user
    set stays, and gloo chooses where no interface of this node leads to the address.

    Args:
        address: name or address of rank 0's node; where all ranks are on one node, loopback.
    """
    global _chosen
    if os.environ.get(_VARIABLE, _chosen) != _chosen:
        return
    _chosen = interface_to(address)
    if _chosen is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = _chosen


def interface_to(address: str) -> str | None:
    """The interface from which this node reaches an address, such as "eth0"; None where none is known.

    Many nodes know their own name by a loopback address, on which other nodes would not find them: that counts only
    where it was given as such.
    """
    own = _own_address(address)
    if own is None or (ipaddress.ip_address(own).is_loopback and not _is_loopback(address)):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own for each in addresses):
            return name
    return None


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _own_address(address: str) -> str | None:
    """From which packets to an address leave; on the node that has the address, this one itself."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(place)
            return str(asking.getsockname()[0]).partition("%")[0]
    except OSError:
        return None
