"""Choose a transport once and say which."""

from __future__ import annotations

import logging

import torch.distributed as dist

from distca.transport.collective import CollectiveTransport
from distca.transport.transport import Transport, TransportError

logger = logging.getLogger(__name__)

NAMES = ("auto", "nccl", "gloo")


def choose_transport(name: str, group: dist.ProcessGroup) -> Transport:
    """Return the named transport over ``group``, or with "auto" the one of the group's backend.

    Raises:
        TransportError: the name is unknown, or the group has another backend.
    """
    if name not in NAMES:
        raise TransportError(f"cad.transport is '{name}'; it can be {', '.join(NAMES)}.")
    transport = CollectiveTransport(group)
    if name != "auto" and name != transport.name:
        raise TransportError(
            f"cad.transport={name} cannot be used here: the ranks talk over {transport.name}. Set cad.transport=auto."
        )
    logger.info("Transport: %s over %d ranks", transport.name, transport.ranks)
    return transport
