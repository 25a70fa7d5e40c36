"""The places of exchanges in the receive buffers of the NVSHMEM transport.

- exchange: one movement of tensor rows between all ranks. Senders write rows into the receivers' buffers.
- hop: an exchange is one hop, or two if receivers send rows on to further ranks.
- number: hops are numbered 1, 2, 3 and so on. An exchange has the number of its last hop.
- place: the bytes of the receive buffer for one exchange, the same on all ranks.
- part: the rows of one tensor in an exchange.
- consumed: a receiver has copied the rows of an exchange out of its buffer.

Places follow each other in the buffer and begin again at byte 0. Example: a buffer of 1 MiB and exchanges of 384 KiB.
Exchange 1 begins at byte 0, exchange 2 at 384 KiB, and exchange 3 at byte 0 again. Senders of exchange 3 wait until
the receivers have consumed exchange 1.

A rank may launch an exchange before it has consumed the previous one. If their places overlapped, the new rows could
not arrive before the previous ones are consumed. A rank that waits for the new rows first would wait forever. So such
an exchange gets no place, and ``transport.py`` uses another transport or raises an error.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from distca.errors import TransportError

_ALIGNMENT = 256
"""The rows of each part begin at a multiple of this many bytes. Kernels need a multiple of 16."""
_GIB = 2**30


@dataclass(frozen=True)
class RingPlace:
    """The place of one exchange.

    Attributes:
        number: number of the exchange.
        begin: first byte in the receive buffer, a multiple of 256.
        offsets: first byte of each part, counted from ``begin``; multiples of 256.
        reuses: senders wait until receivers have consumed all exchanges up to this number; 0 for no wait.
    """

    number: int
    begin: int
    offsets: tuple[int, ...]
    reuses: int


class ReceiveRing:
    """Computes the places of exchanges in buffers of ``capacity`` bytes; the option named ``setting`` sets the size."""

    def __init__(self, capacity: int, setting: str) -> None:
        self.capacity = capacity
        self._setting = setting
        self._next = 0  # first byte behind the newest exchange's place
        self._number = 0  # number of the newest exchange
        self._reused = 0  # the largest ``reuses`` so far
        # Places of the exchanges after number ``_reused``: (number, begin, end), oldest first.
        self._in_use: deque[tuple[int, int, int]] = deque()
        self._not_consumed: set[int] = set()  # exchanges that this rank has launched and not consumed

    def place(self, sizes: tuple[int, ...], hops: int = 1) -> RingPlace:
        """Returns the place of the next exchange. This rank must have consumed all exchanges before the previous one.

        Args:
            sizes: for each part of each hop, bytes on the rank that receives most.

        Raises:
            TransportError: the place would not fit into the buffer, or would overlap the previous one's place.
        """
        offsets, size = _offsets(sizes)
        begin, reuses = self._next_place(size)
        if not self._is_free(size, reuses):
            raise TransportError(self._too_small(size))
        self._check_consumed()
        self._number += hops
        self._reused = reuses
        while self._in_use and self._in_use[0][0] <= reuses:
            self._in_use.popleft()
        self._in_use.append((self._number, begin, begin + size))
        self._not_consumed.add(self._number)
        self._next = begin + size
        return RingPlace(self._number, begin, tuple(offsets), reuses)

    def skip(self) -> int:
        """Numbers the next exchange, which another transport runs without a place here; returns the number.

        Callers must later call :meth:`consumed` with this number."""
        self._check_consumed()
        self._number += 1
        self._not_consumed.add(self._number)
        return self._number

    def why_not(self, sizes: tuple[int, ...]) -> str | None:
        """Returns the message of the error that :meth:`place` would raise, or None; the same on all ranks."""
        _, size = _offsets(sizes)
        return None if self._is_free(size, self._next_place(size)[1]) else self._too_small(size)

    def _check_consumed(self) -> None:
        older = sorted(self._not_consumed - {self._number})
        assert not older, f"exchanges {older} are not consumed, though {self._number} is the newest"

    def _next_place(self, size: int) -> tuple[int, int]:
        """Returns ``begin`` and ``reuses`` (:class:`RingPlace`) of the next place, of ``size`` bytes."""
        begin = self._next if self._next + size <= self.capacity else 0
        overlapped = (number for number, a, b in self._in_use if a < begin + size and begin < b)
        # Exchanges up to self._reused are no longer in self._in_use. But senders have waited only for the receivers of
        # their own rows, and the next exchange may have other receivers. So ``reuses`` is at least self._reused.
        return begin, max(self._reused, *overlapped, 0)

    def _is_free(self, size: int, reuses: int) -> bool:
        """Whether a place from :meth:`_next_place` is inside the buffer and clear of the newest exchange's place."""
        return size <= self.capacity and (reuses < self._number or not self._number)

    def consumed(self, number: int) -> int:
        """Notes that this rank has consumed exchange ``number``.

        Returns the largest n for which this rank has consumed all exchanges with numbers up to n."""
        self._not_consumed.remove(number)
        return min(self._not_consumed, default=self._number + 1) - 1

    def _too_small(self, size: int) -> str:
        # ``before`` is the size of the newest exchange's place. With before + 2 * size bytes, the exchange fits in
        # front of this place or behind it. The message asks for more, because later exchanges may be larger.
        before = sum(end - begin for number, begin, end in self._in_use if number == self._number)
        needed = before + 3 * max(size, before)
        beside = f" beside the exchange before it, of {before / _GIB:.3g} GiB" if before else ""
        return (
            f"{self._setting} gives {self.capacity / _GIB:.3g} GiB of symmetric memory per rank, but an exchange of "
            f"{size / _GIB:.3g} GiB does not fit{beside}; "
            f"set {self._setting} to {needed / _GIB + 0.005:.2f} or more, or lower `tokens_per_rank`."
        )


def _offsets(sizes: tuple[int, ...]) -> tuple[list[int], int]:
    offsets, size = [], 0
    for part in sizes:
        offsets.append(size)
        size += -(-part // _ALIGNMENT) * _ALIGNMENT
    return offsets, size
