"""Chooses the network interface on which gloo's process groups listen.

On one node it is loopback, on several nodes the interface from which MASTER_ADDR is reached. By itself gloo would take
the interface of the host's name. Processes outside the run might reach that.
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
"""A port to ask the system for the way to an address. No packet is sent to it."""

_chosen: str | None = None
"""The interface that :func:`bind_gloo` chose last; it differs from the variable if the user has set that."""


def on_one_node(size: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether all ``size`` ranks, and all servers without a model, are on this node, by the launcher's variables."""
    here = size == 1 or environment.get("LOCAL_WORLD_SIZE") == str(size)
    return here and pool_on_one_node(environment)


def pool_on_one_node(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether all servers without a model are on the ranks' only node, by the launcher's variables. True without
    servers."""
    return environment.get("POOL_NODES", "1") == "1"


def bind_gloo(address: str = LOOPBACK) -> None:
    """Makes gloo's process groups that are created from now on listen on the interface that leads to an address.

    A variable GLOO_SOCKET_IFNAME that the user has set stays. If no interface leads to the address, gloo chooses.

    Args:
        address: name or address of rank 0's node; loopback if all ranks are on one node.
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
    """Returns the interface from which this node reaches an address, such as "eth0"; None if none is found.

    On many nodes the node's own name stands for a loopback address, at which other nodes cannot reach it. So loopback
    is returned only if ``address`` is itself a loopback address.
    """
    own = _own_address(address)
    if own is None or (ipaddress.ip_address(own).is_loopback and not _is_loopback(address)):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own for each in addresses):
            return name
    return None


def _is_loopback(address: str) -> bool:
    """Whether an address is "localhost" or a loopback address; False for other names."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _own_address(address: str) -> str | None:
    """Returns this node's own address from which it would send packets to ``address``; None if there is no way."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(place)
            return str(asking.getsockname()[0]).partition("%")[0]
    except OSError:
        return None
