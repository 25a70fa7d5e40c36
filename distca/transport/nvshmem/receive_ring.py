"""The place where the rows of an exchange land in every rank's receive buffer, and when it may be used again.

Exchanges are numbered 1, 2, 3, ... alike on all ranks. All ranks give an exchange the same place, so a sender knows
where its rows go without asking. Places follow each other round the buffer, as in a ring. A place is free again once
the receiver has consumed every older exchange that lay there. Senders wait for that on their stream, by the number of
the newest such exchange.

Example: a buffer of 1 MiB and exchanges of 384 KiB. Exchange 1 has bytes from 0, exchange 2 from 384 KiB, and exchange
3 from 0 again. Its senders first wait until the receiver has consumed exchange 1.

An exchange that does not fit beside those under way is refused, by all ranks or by none. In a pipeline, ranks that only
serve join exchanges at other times than ranks with tokens. Some may have consumed the exchange before, and others not;
so it counts as under way on all ranks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from distca.errors import TransportError

_ALIGNMENT = 256
"""Bytes that places of parts are multiples of, so that kernels may read 16 bytes at a time."""
_GIB = 2**30


@dataclass(frozen=True)
class RingPlace:
    """The place of one exchange.

    Attributes:
        number: number of the exchange, from 1. Each hop has a number, one after the other; this is that of the last.
        begin: first byte in the receive buffer; a multiple of 256.
        offsets: where each part of the exchange begins, in bytes from ``begin``; multiples of 256.
        reuses: newest exchange whose rows must have been consumed before new ones are written; 0 for none.
    """

    number: int
    begin: int
    offsets: tuple[int, ...]
    reuses: int


class ReceiveRing:
    """Gives exchanges their places; pure bookkeeping on the host, the same on every rank.

    Args:
        capacity: bytes of the receive buffer.
        setting: name of the setting that makes it larger, for errors.
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
        """Returns the place of the next exchange. Of the exchanges before it, only the newest may be under way.

        Args:
            sizes: bytes of all parts of all hops, each on the rank that receives most of it.
            hops: number of hops; each has a number, and they are consumed together.

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
        """Returns the number of an exchange that the fallback transport takes.

        It needs no place, but counts: once the next exchange is numbered, those before this one are consumed on all
        ranks, and their places are free."""
        assert self._not_consumed <= {self._number}, f"{sorted(self._not_consumed)} of {self._number} are under way"
        self._number += 1
        self._not_consumed.add(self._number)
        return self._number

    def why_not(self, sizes: tuple[int, ...]) -> str | None:
        """Returns the sentence with which :meth:`place` would refuse an exchange, or None; the same on every rank."""
        _, size = _offsets(sizes)
        return None if self._is_free(size, self._next_place(size)[1]) else self._too_small(size)

    def _next_place(self, size: int) -> tuple[int, int]:
        """Returns the first byte of the next exchange, and the newest exchange whose memory it uses again."""
        begin = self._next if self._next + size <= self.capacity else 0
        overlapped = (number for number, a, b in self._lying if a < begin + size and begin < b)
        # The second never falls. A rank that sent nothing in an earlier exchange did not wait for that one's place, and
        # so does it now.
        return begin, max(self._reused, *overlapped, 0)

    def _is_free(self, size: int, reuses: int) -> bool:
        return size <= self.capacity and (reuses < self._number or not self._number)

    def consumed(self, number: int) -> int:
        """Notes that the rows of an exchange were consumed; returns the number up to which all exchanges were."""
        self._not_consumed.remove(number)
        return min(self._not_consumed, default=self._number + 1) - 1

    def _too_small(self, size: int) -> str:
        # Three times the largest exchange has room for two, with what is left over at the end of the ring.
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
