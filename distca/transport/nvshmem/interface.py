"""The interface between the NVSHMEM transport (transport.py) and its *fabric*: all ranks' memory and signals.

- peers: the other ranks. They write rows into this rank's receive buffer.
- hop: one movement of rows between all ranks. All ranks number hops 1, 2, 3 and so on.
- exchange: one hop, or two if ranks send rows on.
- arrived: the rows lie in the receiver's buffer. Then the sender signals the hop's number to the receiver.
- consumed: a rank has copied an exchange's rows out of its buffer.
- token: a value that :meth:`Fabric.join` waits for.

``NvshmemFabric`` (symmetric_memory.py) implements the interface on GPUs. Tests have an implementation for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from distca.transport.cuda_ops import row_bytes
from distca.transport.interface import Part


@dataclass(frozen=True)
class Put:
    """Rows of one tensor to write to one peer.

    Attributes:
        source: contiguous tensor.
        ranges: [N, 3] int64 on the host: for each range of rows the first source row, the first row at the peer, and
            the number of rows. Rows at the peer are counted over all senders, lower ranks first. Example: if lower
            ranks send 10 rows to the peer, the first range begins at row 10. Each other range begins where the one
            before it ends.
        rows: int64 on the device, the source rows of all ranges in order.
        begin: the byte of the peer's receive buffer at which row 0 at the peer begins.
    """

    source: torch.Tensor
    ranges: np.ndarray
    rows: torch.Tensor
    begin: int

    @property
    def bytes(self) -> int:
        return len(self.rows) * self.row_bytes

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.source)


class Fabric(Protocol):
    """Access to all ranks' receive buffers and signals. On GPUs no method blocks the host.

    Attributes:
        receive_buffer: [capacity] uint8, this rank's buffer; all ranks have equal capacity.
    """

    rank: int
    ranks: int
    receive_buffer: torch.Tensor

    def why_not_row(self, row_bytes: int) -> str | None:
        """Returns why :meth:`put` cannot write rows of ``row_bytes`` bytes, the same on all ranks; None if it can."""
        ...

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> Any:
        """Queues a hop's writes and then signals "arrived", after the current stream's earlier work.

        Args:
            reuses: writes to a peer wait until the peer has consumed exchanges up to this hop; 0 for no wait.
            puts: the rows to write, by peer.

        Returns:
            A token. After its :meth:`join`, callers may write to the sources.
        """
        ...

    def keep(self, parts: Sequence[Part], behind: Any) -> Any:
        """Queues copies of the rows that stay on this rank, after the current stream's earlier work.

        Args:
            behind: the first hop's token from :meth:`put`; None if no rank puts rows. Copies may wait for its writes.

        Returns:
            A token for the end of the copies; None if the current stream copies.
        """
        ...

    def join(self, token: Any) -> None:
        """Makes the current stream wait for a token of :meth:`put`, :meth:`keep` or :meth:`beside`."""
        ...

    def arrived(self, number: int, peers: Sequence[int]) -> None:
        """Makes the current stream wait until the rows of hop ``number`` from ``peers`` have arrived."""
        ...

    def beside(self, work: Callable[[], None]) -> Any:
        """Calls ``work`` on a side stream, which first waits for the caller's stream; returns a token for its end."""
        ...

    def compute(self, work: Callable[[], None]) -> None:
        """Calls ``work``, which queues torch operations on the current stream. On CPUs, tests queue ``work`` itself."""
        ...

    def consumed(self, number: int) -> None:
        """Signals to all peers, after the stream's earlier work, that exchanges up to hop ``number`` are consumed."""
        ...
