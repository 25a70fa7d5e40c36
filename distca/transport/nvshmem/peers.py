"""What a rank writes in one exchange: inside its node by copy engine or kernel, to other nodes by NVSHMEM's puts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distca.transport.interface import Part
from distca.transport.nvshmem.interface import Put
from distca.transport.nvshmem.internode import InternodePeers
from distca.transport.nvshmem.intranode import IntranodePeers, Sent


@dataclass(frozen=True)
class SentInternode(Sent):
    """Writes of which some go to inter-node peers. The sources may be written again once ``events`` came, before those
    writes are done.

    Attributes:
        intranode: those to intra-node peers.
        written: comes when those to inter-node peers are done.
    """

    intranode: Sent
    written: Any

    def wait(self) -> None:
        """Let the current stream wait for all of them, also for those to inter-node peers."""
        super().wait()
        torch.cuda.current_stream().wait_event(self.written)


class Peers:
    """Shares a rank's writes out to intra-node and inter-node peers.

    Args:
        intranode: writes to peers whose memory this rank maps.
        internode: writes to the others; None where there are none.
        internode_peers: who they are.
    """

    def __init__(
        self, intranode: IntranodePeers, internode: InternodePeers | None, internode_peers: Collection[int]
    ) -> None:
        self._intranode, self._internode, self._internode_peers = intranode, internode, frozenset(internode_peers)

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> Sent:
        """See :meth:`distca.transport.nvshmem.interface.Fabric.put`."""
        internode = {peer: pieces for peer, pieces in puts.items() if peer in self._internode_peers}
        if self._internode is None or not internode:
            return self._intranode.put(number, reuses, puts)
        # First, as they take longest.
        packed, written = self._internode.put(number, reuses, internode)
        intranode = self._intranode.put(number, reuses, {peer: puts[peer] for peer in puts if peer not in internode})
        return SentInternode(
            packed.events + intranode.events, packed.held + intranode.held, tuple(puts), reuses, intranode, written
        )

    def keep(self, parts: Sequence[Part], behind: Sent | None) -> Sent | None:
        """See :meth:`distca.transport.nvshmem.interface.Fabric.keep`. Kept rows wait for copies to intra-node peers
        only, as those alone share the engines with them."""
        return self._intranode.keep(parts, behind.intranode if isinstance(behind, SentInternode) else behind)
