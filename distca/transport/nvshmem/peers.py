"""What a rank writes in one exchange: to near peers by copy engine or kernel, to far peers by NVSHMEM's puts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distca.transport.interface import Part
from distca.transport.nvshmem.interface import Put
from distca.transport.nvshmem.internode import FarPeers
from distca.transport.nvshmem.intranode import NearPeers, Sent


@dataclass(frozen=True)
class SentFar(Sent):
    """Writes of which some go to far peers. The sources may be written again once ``events`` came, before those writes
    are done.

    Attributes:
        near: those to near peers.
        written: comes when those to far peers are done.
    """

    near: Sent
    written: Any

    def wait(self) -> None:
        """Let the current stream wait for all of them, also for those to far peers."""
        super().wait()
        torch.cuda.current_stream().wait_event(self.written)


class Peers:
    """Shares a rank's writes out to near and far peers.

    Args:
        near: writes to peers whose memory this rank maps.
        far: writes to the others; None where there are none.
        far_peers: who they are.
    """

    def __init__(self, near: NearPeers, far: FarPeers | None, far_peers: Collection[int]) -> None:
        self._near, self._far, self._far_peers = near, far, frozenset(far_peers)

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> Sent:
        """See :meth:`distca.transport.nvshmem.interface.Fabric.put`."""
        far = {peer: pieces for peer, pieces in puts.items() if peer in self._far_peers}
        if self._far is None or not far:
            return self._near.put(number, reuses, puts)
        # First, as they take longest.
        packed, written = self._far.put(number, reuses, far)
        near = self._near.put(number, reuses, {peer: puts[peer] for peer in puts if peer not in far})
        return SentFar(packed.events + near.events, packed.held + near.held, tuple(puts), reuses, near, written)

    def keep(self, parts: Sequence[Part], behind: Sent | None) -> Sent | None:
        """See :meth:`distca.transport.nvshmem.interface.Fabric.keep`. Kept rows wait for copies to near peers only, as
        those alone share the engines with them."""
        return self._near.keep(parts, behind.near if isinstance(behind, SentFar) else behind)
