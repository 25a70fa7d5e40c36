"""The place where the rows of an exchange land in every rank's symmetric memory, and when it may be used again.

Exchanges are numbered 1, 2, 3, ... alike on all ranks, and all ranks give an exchange the same place, so a sender knows
where its rows go without asking. Places follow each other round a ring. A place is free again once the receiver has
consumed every older exchange that lay there; senders wait for that, on their stream, by the number of the newest such
exchange (its credit).

An exchange whose place is not free is refused, by all ranks or by none. Some may have consumed the exchange before it
and others not, since in a pipeline ranks that only serve join at other times. So that exchange counts as under way on
all.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from distca.errors import TransportError

_ALIGNMENT = 256
_GIB = 2**30


@dataclass(frozen=True)
class RingPlace:
    """The place of one exchange.

    Attributes:
        number: of the exchange, from 1; with several hops that of the last, whose numbers follow each other.
        begin: first byte in the receive buffer; a multiple of 256.
        offsets: where each of its parts begins, in bytes from ``begin``; multiples of 256.
        reuses: newest exchange whose rows must have been consumed before new ones are written; 0 for none.
    """

    number: int
    begin: int
    offsets: tuple[int, ...]
    reuses: int


class ReceiveRing:
    """Gives exchanges their places; pure bookkeeping on the host, the same on every rank.

    Args:
        capacity: bytes of receive buffer.
        setting: what a user sets to get more, for the error.
    """

    def __init__(self, capacity: int, setting: str) -> None:
        self.capacity = capacity
        self._setting = setting
        self._next = 0
        self._number = 0
        self._reused = 0
        self._lying: deque[tuple[int, int, int]] = deque()  # (number, begin, end), oldest first
        self._not_consumed: set[int] = set()

    def place(self, sizes: tuple[int, ...], hops: int = 1) -> RingPlace:
        """The place of the next exchange, whose parts take ``sizes`` bytes on the rank that receives most. Of the
        exchanges before it none but the newest may be under way.

        Args:
            sizes: of all parts, of all hops.
            hops: how many; each has a number, and they are consumed together.

        Raises:
            TransportError: it does not fit beside the exchanges that are under way; nothing was sent.
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
        """The number of an exchange that goes another way: once the next one is numbered, those before it are consumed
        on all ranks, and their places free."""
        assert self._not_consumed <= {self._number}, f"{sorted(self._not_consumed)} of {self._number} are under way"
        self._number += 1
        self._not_consumed.add(self._number)
        return self._number

    def why_not(self, sizes: tuple[int, ...]) -> str | None:
        """The sentence with which :meth:`place` would refuse an exchange, or None; the same on every rank."""
        _, size = _offsets(sizes)
        return None if self._is_free(size, self._next_place(size)[1]) else self._too_small(size)

    def _next_place(self, size: int) -> tuple[int, int]:
        """Returns the first byte of the next exchange, and the exchange whose memory it uses again."""
        begin = self._next if self._next + size <= self.capacity else 0
        overlapped = (number for number, a, b in self._lying if a < begin + size and begin < b)
        # Never less than before: a rank that sent nothing in the exchange that emptied a place has not waited for it.
        return begin, max(self._reused, *overlapped, 0)

    def _is_free(self, size: int, reuses: int) -> bool:
        return size <= self.capacity and (reuses < self._number or not self._number)

    def consumed(self, number: int) -> int:
        """Note that the rows of an exchange were consumed; returns up to which exchange all were."""
        self._not_consumed.remove(number)
        return min(self._not_consumed, default=self._number + 1) - 1

    def _too_small(self, size: int) -> str:
        # Three times the largest covers what is left over where places wrap around.
        before = sum(end - begin for number, begin, end in self._lying if number == self._number)
        needed = before + 3 * max(size, before)
        return (
            f"{self._setting} gives {self.capacity / _GIB:.3g} GiB of symmetric memory per rank, but an exchange of "
            f"{size / _GIB:.3g} GiB does not fit beside that before it of {before / _GIB:.3g}; "
            f"set {self._setting} to {needed / _GIB + 0.005:.2f} or more, or lower `tokens_per_rank`."
        )


def _offsets(sizes: tuple[int, ...]) -> tuple[list[int], int]:
    """Returns the offset of each part of an exchange in its place, and the bytes of all."""
    offsets, size = [], 0
    for part in sizes:
        offsets.append(size)
        size += -(-part // _ALIGNMENT) * _ALIGNMENT
    return offsets, size
