"""Moving work from servers above their limit to others, each time the piece that costs fewest bytes per second of work.

The server furthest above its limit, the *sender*, gives a piece of its work to one or several *receivers* with room. It
gives, in this order: several whole pieces at once, a part of its cheapest piece, one whole piece, or a piece in
exchange for a smaller one. A server that can give nothing is *stuck* and left as it is.

Array legend: K directions (forward, backward, or both), R ranks, C receivers looked at, P pieces of one sender.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from distca.plan.geometry import cheapest_middle, range_pairs, rows_around
from distca.plan.scheduler.range_split import Excess, RangeSplit, Receivers, Timer, least_of, split_range
from distca.plan.scheduler.state import MovedRanges, Pieces, SchedulerState

ENOUGH = 1e-9
"""The part of the mean load below which a difference is rounding. It is no limit on plans."""
_LEAST_ROOM = 1e-4
"""The least room of a receiver, in parts of the mean load; less is not worth a range. Most constants here save time or
serve rare cases: other values change plans by less than 1 % (benchmarks/results/planner.md)."""
_TRIES = 3
"""Pieces of a sender from which a part is tried to be cut, cheapest first, before whole pieces are tried."""
_FAILED = 64
"""Cuts that did not pay after which balancing ends once all servers are within the tolerance. Only crumbs of room are
left then, and filling them would take longer than all moves before."""
_FAILED_UNLIKE = 2
"""Cuts that did not pay after which balancing ends where servers are not alike; there the limit rises next."""
_PARTNERS = 8
"""Receivers with which an exchange of pieces is tried, those with most room."""
_CRUMB = 64
"""How many times smaller than what a server should lose a piece must be to count as a crumb. Crumbs are handed over
many at a time, since a thousand moves of one each would take as long as planning everything else."""
_MOST_EXCHANGED = 1024
"""Pieces of a server that are looked at for an exchange, the shortest; a table of all pairs is searched."""
_NO_DOCUMENT = -1
_KV_SHARE = 0.56
"""The part of k,v rows in the bytes of a range at its cheapest place, which a receiver that has them already saves. It
follows from 32 query and 8 key/value heads; 0.3 moved 0.4 % fewer bytes, 0.8 as many."""


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
        """Moves work until no server can be relieved any more; returns whether none is left above its limit.

        Args:
            at_most: balancing ends early once a stuck server is further than this above its fair share, as a part of
                the mean.
            enough: balancing ends early, too, once many cuts did not pay and no server is further than this above its
                fair share.
        """
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
        """The next sender: the server furthest above its limit, None where none is above it.

        Servers that share the ``document`` that moved last come first, since receivers have its k,v rows now. ``free``
        [R] is how far below their limits servers are, negative above, in parts of the mean."""
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
        """Gives away work of the sender; returns the document of it, ``_NO_DOCUMENT`` for several, None for nothing.

        Args:
            sender: the server that gives.
            room: [K, R] seconds that servers are below their limits.
            free: [R] the smaller of both directions' room, in parts of the mean.
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
                # Crumbs are moved together: each by itself would take as long as all of them.
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
        """[P] bytes per query-key pair of each piece: those of its cheapest range with ``work``, in parts of the mean.

        The middle of that range is where geometry.cheapest_middle has it, as far as the piece reaches there."""
        if not len(pieces) or work <= ENOUGH:
            return np.full(len(pieces), np.inf)
        # Positions become floats first: numpy takes twice as long where types are mixed.
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
        """Hands the cheapest pieces to one receiver in one step, as many as it has room for and the sender must lose;
        returns whether any went.

        The other arguments are as in :meth:`_move`; ``price`` [P] is infinite for pieces that must not go, and
        ``wanted`` is what the sender should lose, in parts of the mean."""
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
        """Hands over one whole piece where no cut pays; returns whether it did.

        It is the shortest piece that covers the need, or else the longest that fits."""
        receiver = self._one_receiver(free, np.inf)
        fits = (self.state.on(receiver, sender, pieces) <= room[:, receiver][:, None]).all(axis=0)
        covers = fits & (pieces.seconds >= need[:, None]).all(axis=0)
        if not fits.any() or receiver == sender:
            return False
        rows = pieces.rows
        best = np.argmin(np.where(covers, rows, np.iinfo(np.int64).max)) if covers.any() else np.argmax(fits * rows)
        return self._hand_over(sender, pieces, np.array([best]), receiver)

    def _exchange(self, sender: int, pieces: Pieces, need: np.ndarray, room: np.ndarray, free: np.ndarray) -> bool:
        """Swaps two whole pieces where nothing fits alone; returns whether it did.

        One piece of the sender goes against a slightly smaller one of a receiver. The shortest such pair is taken."""
        # All pairs of a given and a taken piece: [K, given, taken] seconds that the sender loses and the receiver
        # gains.
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
        """Moves the ``chosen`` whole pieces to the receiver; returns whether there was anything to move."""
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
        # The last order is sorted anew: little changes from move to move, and a nearly sorted array takes less time.
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
        """The fullest rank with room for ``wanted``, or else the emptiest one."""
        order = self.state.order
        fits = np.where(free[order] >= wanted, free[order], np.inf)
        at = int(np.argmin(fits)) if np.isfinite(fits).any() else int(np.argmax(free[order]))
        return int(order[at])

    def _move_part(self, sender: int, piece: int, need: np.ndarray, room: np.ndarray, free: np.ndarray) -> bool:
        """Cuts ranges out of a piece for the cheapest receivers; returns whether a cut paid.

        Receivers that would then read too many k,v rows are asked only where the others do not do."""
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
        """Ranks with room, those that cost fewest bytes per second of work first.

        Ranks of the sender's node cost less, as do empty ones, and those that have k,v rows of the document. Bytes per
        second fall with the root of the room. So ``worth``, room over squared price, sorts ranks without a root."""
        state, network = self.state, self.state.links.network_price
        distant, q_price, squared = self._prices_from(int(state.node[sender]))
        worth = np.where(free > _LEAST_ROOM, free, 0.0) / squared
        sharing, had = state.sharers(document)
        worth[sharing] /= (1.0 - _KV_SHARE * np.minimum(1.0, had / stop)) ** 2
        ranks = self._falling(worth)

        def price(low: np.ndarray, ends: np.ndarray, chosen: list[int]) -> np.ndarray:
            # Query rows of range i cost each[i] · (ends[i] − ends[i − 1]), which adds up as ends @ rises − low ·
            # each[0].
            to = ranks.take(chosen)
            each = q_price.take(to)
            rises = each.copy()
            rises[:-1] -= each[1:]
            of_keys = self.kv_bytes * state.kv_rows(document, to, ends, network)
            return np.asarray(ends @ rises - low * each[0] + of_keys)

        return Receivers(ranks, room.take(ranks, axis=1), distant.take(ranks), price)

    def _prices_from(self, node: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns for every rank [R], as seen from ``node``: 1 if it is on another node, else 0; the price of a query
        row; and the price of a byte, squared."""
        if node not in self.prices:
            distant = (self.state.node != node).astype(np.float64)
            price = np.where(distant, self.state.links.network_price, 1.0)
            self.prices[node] = distant, self.q_bytes * price, price**2
        return self.prices[node]


def _cheapest(price: np.ndarray) -> Iterator[int]:
    """The ``_TRIES`` cheapest pieces by [P] ``price``, as far as it is finite; most often only the first is asked
    for."""
    for _ in range(min(_TRIES, len(price))):
        best = int(price.argmin())
        if not price[best] < np.inf:
            return
        yield best
        price = price.copy()
        price[best] = np.inf
