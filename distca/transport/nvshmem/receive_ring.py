"""The place of each exchange in the receive buffers of the NVSHMEM transport, and when the place may be used again.

An *exchange* moves rows between all ranks; senders write them straight into the receivers' buffers. Exchanges are
numbered 1, 2, 3 and so on. All ranks compute the same place for an exchange, so senders need not ask where to write.
Places go round the buffer, as in a ring. A receiver *consumes* an exchange when it copies the rows out of the buffer.
Senders may write to a place again once the receiver has consumed all exchanges that lay there. They wait for the newest
of these, by its number.

An exchange may have two *hops*: rows go to one rank of a node, which hands them on to others there. Both hops share the
exchange's place.

Example: a buffer of 1 MiB and exchanges of 384 KiB. Exchange 1 has bytes from 0, exchange 2 from 384 KiB, and exchange
3 from 0 again. Its senders first wait until the receiver has consumed exchange 1.

Callers launch an exchange while at most the one before is under way. An exchange that does not fit beside the one
before is refused, by all ranks or by none. Some ranks may have consumed the one before and others not, since ranks wait
at different times. So all ranks treat it as not consumed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from distca.errors import TransportError

_ALIGNMENT = 256
"""Bytes; each tensor's rows begin at a multiple of it, so that kernels may read 16 bytes at a time."""
_GIB = 2**30


@dataclass(frozen=True)
class RingPlace:
    """The place of one exchange.

    Attributes:
        number: number of the exchange. One with two hops has two consecutive numbers, of which this is the second.
        begin: first byte in the receive buffer; a multiple of 256.
        offsets: first byte of each part (the rows of one tensor), counted from ``begin``; multiples of 256.
        reuses: newest exchange that must have been consumed before rows are written; 0 for none.
    """

    number: int
    begin: int
    offsets: tuple[int, ...]
    reuses: int


class ReceiveRing:
    """Computes the places of exchanges, on the host and alike on every rank; it touches no memory.

    Args:
        capacity: bytes of the receive buffer.
        setting: name of the setting that makes the buffer larger, for errors.
    """

    def __init__(self, capacity: int, setting: str) -> None:
        self.capacity = capacity
        self._setting = setting
        self._next = 0  # first byte behind the newest exchange
        self._number = 0  # of the newest exchange
        self._reused = 0  # the largest ``reuses`` so far
        self._lying: deque[tuple[int, int, int]] = deque()  # places in use: (number, begin, end), oldest first
        self._not_consumed: set[int] = set()  # exchanges that this rank has launched and not consumed

    def place(self, sizes: tuple[int, ...], hops: int = 1) -> RingPlace:
        """Returns the place of the next exchange. This rank must have consumed all exchanges but the newest.

        Args:
            sizes: bytes of each part of all hops, on the rank that receives most of that part.
            hops: number of hops; each gets a number, and they are consumed together.

        Raises:
            TransportError: the exchange does not fit beside the one before; nothing was sent.
        """
        offsets, size = _offsets(sizes)
        begin, reuses = self._next_place(size)
        if not self._is_free(size, reuses):
            raise TransportError(self._too_small(size))
        assert self._not_consumed <= {self._number}, f"{sorted(self._not_consumed)} of {self._number} are under way"
        self._number += hops
        self._reused = reuses
        while self._lying and self._lying[0][0] <= reuses:
            self._lying.popleft()
        self._lying.append((self._number, begin, begin + size))
        self._not_consumed.add(self._number)
        self._next = begin + size
        return RingPlace(self._number, begin, tuple(offsets), reuses)

    def skip(self) -> int:
        """Returns a number for an exchange that another transport takes, as it does not fit.

        It needs no place, but is consumed like the others. So when the next exchange gets a place, this rank has
        consumed all exchanges before this one."""
        assert self._not_consumed <= {self._number}, f"{sorted(self._not_consumed)} of {self._number} are under way"
        self._number += 1
        self._not_consumed.add(self._number)
        return self._number

    def why_not(self, sizes: tuple[int, ...]) -> str | None:
        """Returns the message of the error that :meth:`place` would raise, or None; the same on every rank."""
        _, size = _offsets(sizes)
        return None if self._is_free(size, self._next_place(size)[1]) else self._too_small(size)

    def _next_place(self, size: int) -> tuple[int, int]:
        """Returns the first byte of the next exchange, and its ``reuses``."""
        begin = self._next if self._next + size <= self.capacity else 0
        overlapped = (number for number, a, b in self._lying if a < begin + size and begin < b)
        # ``reuses`` never gets smaller, though places up to self._reused are no longer in self._lying. A rank that sent
        # nothing in the earlier exchange has not waited for them, and must do so now.
        return begin, max(self._reused, *overlapped, 0)

    def _is_free(self, size: int, reuses: int) -> bool:
        """Whether an exchange fits into the buffer and does not overlap the exchange before it."""
        return size <= self.capacity and (reuses < self._number or not self._number)

    def consumed(self, number: int) -> int:
        """Notes that this rank has consumed an exchange; returns the number up to which it has consumed all."""
        self._not_consumed.remove(number)
        return min(self._not_consumed, default=self._number + 1) - 1

    def _too_small(self, size: int) -> str:
        # With so much memory the exchange always finds a place, even if the bytes before the buffer's end are too few.
        before = sum(end - begin for number, begin, end in self._lying if number == self._number)
        needed = before + 3 * max(size, before)
        return (
            f"{self._setting} gives {self.capacity / _GIB:.3g} GiB of symmetric memory per rank, but an exchange of "
            f"{size / _GIB:.3g} GiB does not fit beside that before it of {before / _GIB:.3g}; "
            f"set {self._setting} to {needed / _GIB + 0.005:.2f} or more, or lower `tokens_per_rank`."
        )


def _offsets(sizes: tuple[int, ...]) -> tuple[list[int], int]:
    """Returns the offset of each part from the first byte of the exchange's place, and the bytes of the whole place."""
    offsets, size = [], 0
    for part in sizes:
        offsets.append(size)
        size += -(-part // _ALIGNMENT) * _ALIGNMENT
    return offsets, size
