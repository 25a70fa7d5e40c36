"""Moving work from servers above their limit to others, by best time per byte, each time what costs fewest bytes.

Array legend: K directions (forward, backward, or both), R ranks, C receivers looked at, P pieces of one giving server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from distca.plan.geometry import cheapest_middle, range_pairs, rows_around
from distca.plan.scheduler.range_split import Excess, RangeSplit, Receivers, Timer, least_of, split_range
from distca.plan.scheduler.state import MovedRanges, Pieces, SchedulerState

ENOUGH = 1e-9
"""A difference below this share of the mean load is rounding."""
_LEAST_ROOM = 1e-4
_TRIES = 3
_FAILED = 64
"""Cuts that did not pay after which nobody is brought closer to the mean than the tolerance: only crumbs of room are
left, and they would take longer than all moves before."""
_FAILED_UNLIKE = 2
"""The same where servers are not alike, and the limit rises soon."""
_PARTNERS = 8
"""Receivers with which an exchange of pieces is tried."""
_CRUMB = 64
"""A piece that brings less than such a part of what a server should lose is handed over together with others."""
_MOST_EXCHANGED = 1024
"""Pieces of a server that are looked at for an exchange."""
_NO_DOCUMENT = -1
_KV_SHARE = 0.56
"""Share of k,v rows in the bytes of a range at its best place; what a receiver saves that has them already."""


class Balancer:
    """Moves work until no server is above its limit, or none of those that are can give any away."""

    def __init__(self, state: SchedulerState, timer: Timer, q_bytes: int, kv_bytes: int) -> None:
        self.state, self.timer, self.q_bytes, self.kv_bytes = state, timer, q_bytes, kv_bytes
        self.unit = np.array(timer.unit)[:, None]
        self.stuck = np.zeros(state.layout.ranks, bool)
        self.prices: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.place = np.argsort(state.order)
        self.lately = state.order
        self.failed = 0
        self.unlike = state.work.slowness is not None
        self.patience = _FAILED_UNLIKE if self.unlike else _FAILED

    def run(self, at_most: float, enough: float) -> bool:
        """Moves work until no server is left to relieve.

        It ends before that where a server that nobody can relieve is more than ``at_most`` above its fair share. It
        also ends where too many cuts did not pay and no server is more than ``enough`` above it. Returns whether none
        is left above its limit."""
        state = self.state
        self.stuck[:], self.failed = False, 0
        room = state.limit - state.load
        free = least_of(room / self.unit)
        sender = self._next(free, None)
        while sender is not None:
            document = self._move(sender, room, free)
            if document is None:
                self.stuck[sender] = True
                if state.above_target(sender) > at_most + ENOUGH:
                    break
            else:
                room = state.limit - state.load
                free = least_of(room / self.unit)
            if self.failed > self.patience and (self.unlike or state.most_above_target() <= enough):
                break
            sender = self._next(free, document)
        return bool((free >= -ENOUGH).all())

    def _next(self, free: np.ndarray, document: int | None) -> int | None:
        """The server furthest above its limit, of which [R] ``free`` is left; first among those that share
        ``document``, whose k,v rows its receivers now have."""
        state = self.state
        excess = -free
        excess[self.stuck] = 0.0
        if document is not None:
            homes = state.homes(document)
            if homes is not None:
                near = int(homes[excess[homes].argmax()])
                if excess[near] > ENOUGH:
                    return near
        sender = int(state.order[excess[state.order].argmax()])
        return sender if excess[sender] > ENOUGH else None

    def _move(self, sender: int, room: np.ndarray, free: np.ndarray) -> int | None:
        """Give the piece that costs fewest bytes per second of work; returns its document, None when nothing can go.

        Args:
            sender: who gives.
            room: [K, R] seconds that servers are below their limits.
            free: [R] the least of it, in parts of the mean.
        """
        need = -room[:, sender]
        wanted = -float(free[sender])
        pieces = self.state.pieces_of(sender)
        free = np.maximum(free, 0.0)
        free[sender] = 0.0
        price = self._price_per_pair(pieces, min(wanted, float(free.max())))
        if self._move_whole(sender, pieces, price, need, room, free, wanted):
            return _NO_DOCUMENT
        for best in _cheapest(price):
            if (_CRUMB * pieces.seconds[:, best] < need).all():
                # One by one they would each be looked at as long as all of them.
                crumbs = (_CRUMB * pieces.seconds < need[:, None]).all(axis=0)
                if self._move_whole(sender, pieces, np.where(crumbs, price, np.inf), need, room, free, wanted):
                    return _NO_DOCUMENT
            if self._move_part(sender, best, need, room, free):
                return int(pieces.place[0, best])
        moved = self._move_one(sender, pieces, need, room, free) or (
            not self.unlike and self._exchange(sender, pieces, need, room, free)
        )
        return _NO_DOCUMENT if moved else None

    def _price_per_pair(self, pieces: Pieces, work: float) -> np.ndarray:
        """[P] bytes per query-key pair of the best single range of each piece that has so much work, in parts of the
        mean."""
        if not len(pieces) or work <= ENOUGH:
            return np.full(len(pieces), np.inf)
        # In the type of what follows: numpy takes twice as long where types are mixed.
        _, start, stop = pieces.place.astype(np.float64)
        whole = range_pairs(start, stop)
        seconds = pieces.seconds / self.unit
        per_pair = np.maximum(seconds[0], seconds[-1]) / whole
        wanted = np.minimum(whole, work / per_pair)
        middle = cheapest_middle(wanted, self.q_bytes / self.kv_bytes)
        half = rows_around(middle, wanted, 1.0) / 2
        middle = np.minimum(np.maximum(middle, start + half), np.maximum(stop - half, 1.0))
        rows = np.minimum(rows_around(middle, wanted, 0.5), stop - start)
        return (self.q_bytes * rows + self.kv_bytes * np.minimum(middle + rows / 2, stop)) / wanted

    def _move_whole(
        self,
        sender: int,
        pieces: Pieces,
        price: np.ndarray,
        need: np.ndarray,
        room: np.ndarray,
        free: np.ndarray,
        wanted: float,
    ) -> bool:
        """Hand the cheapest pieces, as long as they are smaller than the need, to one receiver in one step."""
        if not len(price) or least_of(pieces.seconds[:, price.argmin()] - need) > 0:
            return False
        order = np.argsort(price, kind="stable")
        receiver = self._one_receiver(free, wanted)
        total = np.cumsum(pieces.seconds[:, order], axis=1)
        there = np.cumsum(self.state.on(receiver, sender, pieces)[:, order], axis=1)
        fits = (there <= room[:, receiver][:, None]).all(axis=0) & (total <= need[:, None]).any(axis=0)
        fits &= np.isfinite(price[order])
        chosen = order[: int(np.argmin(np.append(fits, False)))]
        return self._hand_over(sender, pieces, chosen, receiver)

    def _move_one(self, sender: int, pieces: Pieces, need: np.ndarray, room: np.ndarray, free: np.ndarray) -> bool:
        """Hands over one whole piece where no cut pays: the shortest that covers the need, else the
        longest that fits."""
        receiver = self._one_receiver(free, np.inf)
        fits = (self.state.on(receiver, sender, pieces) <= room[:, receiver][:, None]).all(axis=0)
        covers = fits & (pieces.seconds >= need[:, None]).all(axis=0)
        if not fits.any() or receiver == sender:
            return False
        rows = pieces.rows
        best = np.argmin(np.where(covers, rows, np.iinfo(np.int64).max)) if covers.any() else np.argmax(fits * rows)
        return self._hand_over(sender, pieces, np.array([best]), receiver)

    def _exchange(self, sender: int, pieces: Pieces, need: np.ndarray, room: np.ndarray, free: np.ndarray) -> bool:
        """Swaps two whole pieces where nothing fits alone: one of the sender's against a slightly smaller one of a
        receiver. The shortest such pair is taken."""
        given = pieces.shortest(_MOST_EXCHANGED)
        for receiver in self._falling(free)[:_PARTNERS].tolist():
            theirs = self.state.pieces_of(receiver)
            taken = theirs.shortest(_MOST_EXCHANGED)
            here = self.state.on(sender, receiver, theirs), self.state.on(receiver, sender, pieces)
            lost = pieces.seconds[:, given][:, :, None] - here[0][:, taken][:, None, :]
            gained = here[1][:, given][:, :, None] - theirs.seconds[:, taken][:, None, :]
            fits = ((lost >= need[:, None, None]) & (gained <= room[:, receiver, None, None])).all(axis=0)
            if fits.any():
                rows = pieces.rows[given][:, None] + theirs.rows[taken]
                mine, other = divmod(int(np.where(fits, rows, rows.max() + 1).argmin()), rows.shape[1])
                self._hand_over(sender, pieces, given[[mine]], receiver)
                return self._hand_over(receiver, theirs, taken[[other]], sender)
        return False

    def _hand_over(self, sender: int, pieces: Pieces, chosen: np.ndarray, receiver: int) -> bool:
        if not len(chosen) or receiver == sender:
            return False
        part = pieces.take(chosen)
        document, start, stop = part.place.tolist()
        there = self.state.on(receiver, sender, part)
        moved = MovedRanges(document, start, stop, [receiver] * len(chosen), there.tolist())
        lost = [sum(seconds) for seconds in part.seconds.tolist()]
        self.state.move(sender, chosen.tolist(), part.take(np.zeros(0, np.int64)), lost, moved)
        return True

    def _falling(self, worth: np.ndarray) -> np.ndarray:
        """[N] ranks with a ``worth`` [R] above 0, by falling worth, equals in the state's order."""
        # What is almost in order is sorted in a fraction of the time, and little changes from move to move.
        found = -worth.take(self.lately)
        at, some = found.argsort(kind="stable"), np.count_nonzero(worth)
        self.lately = self.lately.take(at)
        found = found.take(at[:some])
        equal = found[1:] == found[:-1]
        if equal.any():
            place = self.place.take(self.lately[:some])
            if (place[1:] < place[:-1])[equal].any():
                self.lately = self.state.order[(-worth[self.state.order]).argsort(kind="stable")]
        return self.lately[:some]

    def _one_receiver(self, free: np.ndarray, wanted: float) -> int:
        """The fullest rank that can take all, else the emptiest."""
        order = self.state.order
        fits = np.where(free[order] >= wanted, free[order], np.inf)
        at = int(np.argmin(fits)) if np.isfinite(fits).any() else int(np.argmax(free[order]))
        return int(order[at])

    def _move_part(self, sender: int, piece: int, need: np.ndarray, room: np.ndarray, free: np.ndarray) -> bool:
        state = self.state
        pieces = state.pieces_of(sender)
        document, start, stop = pieces.place[:, piece].tolist()
        excess = Excess(start, stop, pieces.seconds[:, piece].tolist(), need.tolist())
        may_keep = state.may_keep(document, stop)
        receivers = self._receivers(sender, document, stop, room, np.where(may_keep, free, 0.0))
        split = self._split(sender, excess, receivers)
        if split is None and not may_keep.all():
            receivers = self._receivers(sender, document, stop, room, free)
            split = self._split(sender, excess, receivers)
        if split is None:
            self.failed += len(receivers.rank) > 0
            return False
        cuts, ranks = split.cuts, receivers.rank.take(split.chosen).tolist()
        moved = MovedRanges([document] * len(ranks), cuts[:-1], cuts[1:], ranks, split.moved)
        left = np.array([[document, document], [start, cuts[-1]], [cuts[0], stop]])
        lost = [seconds - sum(kept) for seconds, kept in zip(excess.seconds, split.kept, strict=True)]
        state.move(sender, [piece], Pieces(left, np.array(split.kept)), lost, moved)
        return True

    def _split(self, sender: int, excess: Excess, receivers: Receivers) -> RangeSplit | None:
        if not len(receivers.rank):
            return None
        return split_range(excess, receivers, replace(self.timer, sender=sender, receivers=receivers.rank))

    def _receivers(self, sender: int, document: int, stop: int, room: np.ndarray, free: np.ndarray) -> Receivers:
        """Ranks with room, cheapest bytes per second of work first: near ones, empty ones, readers of the document."""
        state, network = self.state, self.state.links.network_price
        distant, q_price, squared = self._prices_from(int(state.node[sender]))
        worth = np.where(free > _LEAST_ROOM, free, 0.0) / squared
        sharing, had = state.sharers(document)
        worth[sharing] /= (1.0 - _KV_SHARE * np.minimum(1.0, had / stop)) ** 2
        # Bytes per second fall with the root of the room: the order of worth is that of price / sqrt(room), reversed.
        ranks = self._falling(worth)

        def price(low: np.ndarray, ends: np.ndarray, chosen: list[int]) -> np.ndarray:
            to = ranks.take(chosen)
            each = q_price.take(to)
            rises = each.copy()
            rises[:-1] -= each[1:]
            of_keys = self.kv_bytes * state.kv_rows(document, to, ends, network)
            return np.asarray(ends @ rises - low * each[0] + of_keys)

        return Receivers(ranks, room.take(ranks, axis=1), distant.take(ranks), price)

    def _prices_from(self, node: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Three prices for every rank [R]: 1 if it is on another node, else 0; what a query row costs to there; a byte,
        squared."""
        if node not in self.prices:
            distant = (self.state.node != node).astype(np.float64)
            price = np.where(distant, self.state.links.network_price, 1.0)
            self.prices[node] = distant, self.q_bytes * price, price**2
        return self.prices[node]


def _cheapest(price: np.ndarray) -> Iterator[int]:
    """The first few pieces by [P] ``price``, as far as it is finite; most often only the first is asked for."""
    for _ in range(min(_TRIES, len(price))):
        best = int(price.argmin())
        if not price[best] < np.inf:
            return
        yield best
        price = price.copy()
        price[best] = np.inf
