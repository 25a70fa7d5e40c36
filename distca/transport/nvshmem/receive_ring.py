"""The place of each exchange in the receive buffers of the NVSHMEM transport, and when the place may be used again.

An *exchange* moves rows between all ranks: senders write rows straight into the receivers' buffers. Exchanges are
numbered 1, 2, 3 and so on. All ranks compute the same place for an exchange, so senders need not ask where to write.
Places follow each other in the buffer and begin again at byte 0, as in a ring. A receiver *consumes* an exchange when
it copies the rows out of the buffer. Before senders write to a place again, they wait until the receiver has consumed
the exchanges that lay there.

Example: a buffer of 1 MiB and exchanges of 384 KiB. Exchange 1 has bytes from 0, exchange 2 from 384 KiB, and exchange
3 from 0 again. Senders of exchange 3 first wait until the receiver has consumed exchange 1.

A rank may launch an exchange before it has consumed the exchange before. If the places of the two overlapped, all ranks
would wait for each other forever. Such an exchange gets no place (:meth:`ReceiveRing.why_not`). ``transport.py`` then
sends it by another transport, or refuses it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from distca.errors import TransportError

_ALIGNMENT = 256
"""Each tensor's rows begin at a multiple of this number of bytes, so that kernels may read 16 bytes at a time."""
_GIB = 2**30


@dataclass(frozen=True)
class RingPlace:
    """The place of one exchange.

    Attributes:
        number: number of the exchange. If rows travel in two hops (to another rank, and on from there), each hop has a
            number, and this is the second hop's.
        begin: first byte in the receive buffer; a multiple of 256.
        offsets: first byte of each part (the rows of one tensor in one hop), counted from ``begin``; multiples of 256.
        reuses: the receiver must have consumed all exchanges up to this number before rows are written; 0 for no wait.
    """

    number: int
    begin: int
    offsets: tuple[int, ...]
    reuses: int


class ReceiveRing:
    """Computes the places of exchanges, with equal results on every rank.

    Args:
        capacity: bytes of the receive buffer.
        setting: name of the setting that makes the buffer larger, for error messages.
    """

    def __init__(self, capacity: int, setting: str) -> None:
        self.capacity = capacity
        self._setting = setting
        self._next = 0  # first byte behind the newest exchange
        self._number = 0  # number of the newest exchange
        self._reused = 0  # the largest ``reuses`` so far
        self._lying: deque[tuple[int, int, int]] = deque()  # places in use: (number, begin, end), oldest first
        self._not_consumed: set[int] = set()  # exchanges that this rank has launched and not consumed

    def place(self, sizes: tuple[int, ...], hops: int = 1) -> RingPlace:
        """Returns the place of the next exchange. This rank must have consumed all exchanges but the newest.

        Args:
            sizes: bytes of each part (the rows of one tensor in one hop), on the rank that receives most bytes of it.
            hops: number of hops: 1 or 2.

        Raises:
            TransportError: the exchange has no place that leaves the newest exchange's place alone; nothing was sent.
        """
        offsets, size = _offsets(sizes)
        begin, reuses = self._next_place(size)
        if not self._is_free(size, reuses):
            raise TransportError(self._too_small(size))
        self._check_consumed()
        self._number += hops  # each hop has a number
        self._reused = reuses
        while self._lying and self._lying[0][0] <= reuses:
            self._lying.popleft()
        self._lying.append((self._number, begin, begin + size))
        self._not_consumed.add(self._number)
        self._next = begin + size
        return RingPlace(self._number, begin, tuple(offsets), reuses)

    def skip(self) -> int:
        """Returns a number for an exchange that has no place here, since another transport moves the rows.

        Callers must also call :meth:`consumed` with this number."""
        self._check_consumed()
        self._number += 1
        self._not_consumed.add(self._number)
        return self._number

    def why_not(self, sizes: tuple[int, ...]) -> str | None:
        """Returns the message of the error that :meth:`place` would raise, or None; all ranks get the same answer."""
        _, size = _offsets(sizes)
        return None if self._is_free(size, self._next_place(size)[1]) else self._too_small(size)

    def _check_consumed(self) -> None:
        older = sorted(self._not_consumed - {self._number})
        assert not older, f"exchanges {older} are not consumed, though {self._number} is the newest"

    def _next_place(self, size: int) -> tuple[int, int]:
        begin = self._next if self._next + size <= self.capacity else 0
        overlapped = (number for number, a, b in self._lying if a < begin + size and begin < b)
        # self._lying no longer has exchanges up to self._reused. But a rank waits only for the receivers of its rows.
        # Other receivers may not have consumed these exchanges yet. So ``reuses`` must not become smaller.
        return begin, max(self._reused, *overlapped, 0)

    def _is_free(self, size: int, reuses: int) -> bool:
        """Returns whether the place lies inside the buffer and does not overlap the newest exchange's place."""
        return size <= self.capacity and (reuses < self._number or not self._number)

    def consumed(self, number: int) -> int:
        """Notes that this rank has consumed exchange ``number``.

        Returns the largest n such that this rank has consumed all exchanges up to n."""
        self._not_consumed.remove(number)
        return min(self._not_consumed, default=self._number + 1) - 1

    def _too_small(self, size: int) -> str:
        # With before + 2 * size bytes, there are ``size`` bytes in front of the newest exchange's place or behind it,
        # wherever the place lies. More than that is a reserve.
        before = sum(end - begin for number, begin, end in self._lying if number == self._number)
        needed = before + 3 * max(size, before)
        beside = f" beside the exchange before it, of {before / _GIB:.3g} GiB" if before else ""
        return (
            f"{self._setting} gives {self.capacity / _GIB:.3g} GiB of symmetric memory per rank, but an exchange of "
            f"{size / _GIB:.3g} GiB does not fit{beside}; "
            f"set {self._setting} to {needed / _GIB + 0.005:.2f} or more, or lower `tokens_per_rank`."
        )


def _offsets(sizes: tuple[int, ...]) -> tuple[list[int], int]:
    """Returns the offset of each part from the first byte of the exchange's place, and the bytes of the whole place."""
    offsets, size = [], 0
    for part in sizes:
        offsets.append(size)
        size += -(-part // _ALIGNMENT) * _ALIGNMENT
    return offsets, size
