"""The clocks of all ranks in a simulated step: each rank has a stream of computation and a stream of transfers.

All ranks run the same actions in the same order, each with its own seconds. So an action is one call with an array over
ranks. On a stream actions follow each other. Array legend: R ranks, P pairs of ranks that exchange rows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from distca.simulate.fabric import Exchange, Fabric
from distca.words import NANO_NAMES


@dataclass(frozen=True)
class Span:
    """An action of a rank in a timeline. Times are seconds from the step's beginning; ``track`` and ``name`` are as in
    the timeline of a run."""

    rank: int
    track: str
    name: str
    start: float
    seconds: float


@dataclass(frozen=True)
class Arrival:
    """An exchange under way.

    Attributes:
        at: [R] the time at which a rank has all rows that it receives.
        ready: [R] the time at which it would have them if bytes took no time: when the last sender has launched.
        what: the name of the exchange.
    """

    at: np.ndarray
    ready: np.ndarray
    what: str


class Streams:
    """Clocks of all ranks.

    Args:
        fabric: the links between ranks.
        rendezvous: True makes a transfer begin when both ends have launched it, as with NCCL. False makes it begin when
            its sender has.
        watched: numbers of the ranks whose spans are recorded.

    Attributes:
        now: [R] the time in seconds up to which the rank's computation has come.
        busy: [R] seconds in which the rank computed.
        exposed: [R] seconds in which it waited for bytes that were on the links.
        waited: [R] seconds in which it waited for another rank to launch a transfer.
        on_links: [R] seconds in which its links carried rows, in the busier of the two directions.
        sent: [R] bytes that it sent, without rows for experts.
        order: the names of the actions, in order.
        spans: the spans of the watched ranks.
    """

    def __init__(self, fabric: Fabric, *, rendezvous: bool = False, watched: Collection[int] = ()) -> None:
        self.fabric, self._rendezvous, self._watched = fabric, rendezvous, tuple(watched)
        self.now, self.busy, self.exposed, self.waited, self.on_links, self.sent = np.zeros((6, fabric.ranks))
        self._out_free, self._in_free = np.zeros((2, fabric.ranks))
        self._out_ready = np.zeros(fabric.ranks)  # what _out_free would be if bytes took no time
        self.order: list[str] = []
        self.spans: list[Span] = []

    def compute(self, seconds: np.ndarray, name: str, layer: int = 0, nano: int = 0, direction: str = "") -> None:
        """Adds ``seconds`` [R] of computation."""
        self._note(f"{name} {layer} {NANO_NAMES[nano]} {direction}")
        for rank in self._watched:
            if seconds[rank] > 0:
                track = f"compute {NANO_NAMES[nano]}"
                self.spans.append(
                    Span(rank, track, f"{name} {layer} {direction}", float(self.now[rank]), float(seconds[rank]))
                )
        self.now = self.now + seconds
        self.busy += seconds

    def stall(self, seconds: np.ndarray) -> None:
        """Makes the computation wait ``seconds`` [R] for the host."""
        self.now = self.now + seconds

    def launch(
        self,
        exchange: Exchange,
        what: str,
        layer: int = 0,
        nano: int = 0,
        direction: str = "",
        second: Exchange | None = None,
    ) -> Arrival:
        """Starts an exchange behind earlier transfers, and behind it a ``second`` one; returns their arrival."""
        name = f"{what} {layer} {NANO_NAMES[nano]} {direction}"
        self._note(f"launch {name}")
        arrival = self._carry(exchange, name, Arrival(self.now, self.now, what))
        if second is None:
            return arrival
        last, receives = self._carry(second, name, arrival), second.incoming > 0
        return Arrival(
            np.where(receives, last.at, arrival.at), np.where(receives, last.ready, arrival.ready), arrival.what
        )

    def _carry(self, exchange: Exchange, name: str, behind: Arrival) -> Arrival:
        """Returns the arrival of an exchange that each rank begins once ``behind`` has arrived there."""
        if not exchange.travels:
            return behind
        start = np.maximum(behind.at, self._out_free)
        able = np.maximum(behind.ready, self._out_ready)
        begin, ready_from = start[exchange.source], able[exchange.source]
        if self._rendezvous:
            begin = np.maximum(begin, start[exchange.target])
            ready_from = np.maximum(ready_from, able[exchange.target])
        heads, receivers = exchange.heads, exchange.receivers
        at, ready = start.copy(), self.now.copy()
        first = np.minimum.reduceat(begin + exchange.latency, heads)
        last = np.maximum.reduceat(begin + exchange.carried, heads)
        queued = np.maximum(first, self._in_free[receivers]) + exchange.incoming[receivers]
        at[receivers] = np.maximum(last, queued)
        ready[receivers] = np.maximum.reduceat(ready_from, heads)
        self._in_free = np.maximum(self._in_free, np.where(exchange.incoming > 0, at, 0))
        sent = start + exchange.outgoing
        self._out_free = np.maximum(sent, at) if self._rendezvous else sent
        self._out_ready = np.maximum(able, ready) if self._rendezvous else able
        self.on_links += np.maximum(exchange.outgoing, exchange.incoming)
        self.sent += np.bincount(exchange.source, exchange.size, self.fabric.ranks)
        for rank in self._watched:
            end = max(float(at[rank]) if exchange.incoming[rank] else 0.0, float(sent[rank]))
            self.spans.append(
                Span(
                    rank,
                    "transfers",
                    name,
                    float(start[rank]),
                    end - float(start[rank]),
                )
            )
        return Arrival(at, ready, behind.what)

    def join(self, arrival: Arrival, layer: int = 0, nano: int = 0, direction: str = "") -> None:
        """Makes the computation wait for an exchange."""
        self._note(f"join {arrival.what} {layer} {NANO_NAMES[nano]} {direction}")
        self._wait(arrival.at, arrival.ready)

    def collective(self, seconds: np.ndarray, size: np.ndarray, group: int, what: str, layer: int = 0) -> Arrival:
        """Starts a collective in each group of ``group`` consecutive ranks; returns its arrival.

        The ranks of a group begin together. Each takes ``seconds`` [R] and sends ``size`` [R] bytes."""
        start = np.maximum(self.now, self._out_free)
        begun = np.repeat(start.reshape(-1, group).max(axis=1), group)
        at = begun + seconds
        self._out_free = at
        self.on_links += seconds
        self.sent += size
        for rank in self._watched:
            self.spans.append(Span(rank, "transfers", f"{what} {layer}", float(begun[rank]), float(seconds[rank])))
        return Arrival(at, begun, what)

    def all_to_all(self, seconds: np.ndarray, group: int, what: str, layer: int = 0, nano: int = 0) -> Arrival:
        """Starts an exchange of rows for experts in each group of ``group`` consecutive ranks; returns its arrival.

        The ranks of a group begin together and end together, after the longest of their ``seconds`` [H]. A group
        without rows does nothing, and neither do ranks behind the first H."""
        self._note(f"launch {what} {layer} {NANO_NAMES[nano]}")
        homes = len(seconds)
        seconds = np.append(seconds, np.zeros(len(self.now) - homes))

        def most(of: np.ndarray) -> np.ndarray:
            return np.append(np.repeat(of[:homes].reshape(-1, group).max(axis=1), group), of[homes:])

        busy = most(seconds) > 0
        free = np.maximum(self._out_free, self._in_free)
        begun = np.where(busy, most(np.maximum(self.now, free)), self.now)
        ready = np.where(busy, most(np.maximum(self.now, self._out_ready)), self.now)
        at = begun + most(seconds)
        self._out_free, self._in_free = np.where(busy, at, self._out_free), np.where(busy, at, self._in_free)
        self._out_ready = np.where(busy, ready, self._out_ready)
        self.on_links += seconds
        for rank in self._watched:
            if busy[rank]:
                self.spans.append(Span(rank, "transfers", f"{what} {layer}", float(begun[rank]), float(seconds[rank])))
        return Arrival(at, ready, what)

    def _wait(self, at: np.ndarray, ready: np.ndarray) -> None:
        """Moves the clocks to ``at``; the wait until ``ready`` counts as waiting for ranks, the rest as exposed."""
        until = np.maximum(self.now, at)
        for_others = np.clip(ready - self.now, 0, until - self.now)
        self.waited += for_others
        self.exposed += until - self.now - for_others
        self.now = until

    def _note(self, entry: str) -> None:
        self.order.append(entry)
