"""Moves ranges of attention from servers above their limit to other servers, so that few bytes travel.

- A *server* is a rank that computes attention. The *home* of a row is the rank that holds the row.
- A *piece* is a range of query rows of one document on one server.
- A server's *load* is the seconds that its pieces take. If servers are not equally fast, all loads, targets, limits and
  room are scaled to a server of mean speed.
- A server's *target* is the load that it should have. Its *limit* is a little more than its target.
- A *sender* is a server above its limit that gives pieces away. *Receivers* are servers below their limits.
- A *stuck* server is above its limit and can give nothing away. A server's *room* is its limit minus its load.

Moves are tried in this order: several whole pieces; a part that is cut out of a piece; one whole piece; if servers are
equally fast, one piece in exchange for a smaller piece.

Array legend: K directions (one, or both of forward and backward), R ranks, P pieces of the sender, N chosen ranks.
``benchmarks/planner_constants.py`` compares the tuned constants with other values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from distca.plan.geometry import cheapest_middle, range_pairs, rows_around
from distca.plan.scheduler.range_split import Excess, RangeSplit, Receivers, Timer, least_of, split_range
from distca.plan.scheduler.state import MovedRanges, Pieces, SchedulerState

ENOUGH = 1e-9
"""Differences of load up to this part of the mean load count as rounding."""
_LEAST_ROOM = 1e-4
"""A server with less room than this part of the mean load gets no range that was cut out of a piece."""
_TRIES = 3
"""The most pieces of a sender that are tried for a cut, cheapest first."""
_FAILED = 64
"""Balancing ends after more than this many failed cuts, if all servers are close to their targets (``enough`` of
:meth:`Balancer.run`). A cut fails if receivers have too little room, or if the cut adds too much time."""
_FAILED_UNLIKE = 2
"""The value in place of ``_FAILED`` if servers are not equally fast. Balancing then ends even if a server is far above
its target: ``unlike.py`` raises limits and balances again."""
_PARTNERS = 8
"""The most receivers that are tried for an exchange of pieces, beginning with those with most room."""
_CRUMB = 64
"""A piece is a *crumb* if it takes less than 1/64 of the seconds that the sender should lose. Crumbs move together."""
_MOST_EXCHANGED = 1024
"""The most pieces of each of two servers that are tried for an exchange, beginning with the shortest."""
_NO_DOCUMENT = -1
_KV_SHARE = 0.56
"""The part of a range's bytes that are keys and values: an estimate for 32 query heads and 8 key/value heads, taken for
all models. A range is cheaper by this part for a receiver that already has these keys and values."""


class Balancer:
    """Moves pieces until no server, except stuck ones, is above its limit.

    Args:
        state: loads, limits and pieces of all servers; moves are written into it.
        q_bytes: bytes that travel for a query row that is computed away from home.
        kv_bytes: bytes that travel for a key/value row that a server reads away from home.

    Attributes:
        unit: [K, 1] mean load of the servers, in seconds.
        place: [R] position of every rank in ``state.order``.
        lately: [R] all ranks in the order that :meth:`_falling` found last.
    """

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
        """Moves pieces; returns whether all servers are then within their limits.

        Balancing ends early if a server is stuck at more than ``at_most`` above its target. It also ends after many
        failed cuts; with equally fast servers, only once all of them are at most ``enough`` above their targets.
        ``at_most`` and ``enough`` are parts of the mean load."""
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
        """Returns the next sender, usually the server furthest above its limit; None if no server is above its limit.

        ``document`` was cut last. Ranks that computed rows of this document before any move come first: some receivers
        now have its k,v rows, so few bytes travel. ``free`` [R] is how far servers are below their limits, in parts of
        the mean load."""
        state = self.state
        excess = -free
        excess[self.stuck] = 0.0
        if document is not None:
            first = state.first_servers(document)
            if first is not None:
                near = int(first[excess[first].argmax()])
                if excess[near] > ENOUGH:
                    return near
        sender = int(state.order[excess[state.order].argmax()])
        return sender if excess[sender] > ENOUGH else None

    def _move(self, sender: int, room: np.ndarray, free: np.ndarray) -> int | None:
        """Gives away some pieces of the sender, or parts of a piece.

        Args:
            room: [K, R] seconds that servers are below their limits.
            free: [R] ``room`` in parts of the mean load, in the direction with least room.

        Returns:
            The document that was cut; ``_NO_DOCUMENT`` if whole pieces moved; None if nothing moved.
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
        """Returns the [P] price of each piece: bytes for each query-key pair of the cheapest range in the piece.

        The range takes the time ``work``, in parts of the mean load; if the whole piece takes less, the range is the
        whole piece. The middle of the range is as near as possible to the row where a range of that time needs the
        fewest bytes (``cheapest_middle``)."""
        if not len(pieces) or work <= ENOUGH:
            return np.full(len(pieces), np.inf)
        _, start, stop = pieces.place.astype(np.float64)
        whole = range_pairs(start, stop)
        seconds = pieces.seconds / self.unit
        per_pair = np.maximum(seconds[0], seconds[-1]) / whole
        wanted = np.minimum(whole, work / per_pair)
        middle = cheapest_middle(wanted, self.q_bytes / self.kv_bytes)
        half = rows_around(middle, wanted, least=1.0) / 2
        middle = np.minimum(np.maximum(middle, start + half), np.maximum(stop - half, 1.0))
        rows = np.minimum(rows_around(middle, wanted, least=0.5), stop - start)
        # The receiver reads all keys up to the range's end.
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
        """Gives the cheapest whole pieces to one receiver; returns whether any piece went.

        The sender should lose ``need`` [K] seconds. It gives pieces while the receiver has room, and while their sum is
        at most ``need`` in at least one direction. Pieces with an infinite ``price`` [P] stay. ``wanted`` is the
        largest ``need``, in parts of the mean load. ``room`` and ``free`` are those of :meth:`_move`."""
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
        """Gives one whole piece to the receiver with most room; returns whether a piece went.

        This is the shortest piece that fits and covers all of ``need``, or else the longest piece that fits."""
        receiver = self._one_receiver(free, np.inf)
        fits = (self.state.on(receiver, sender, pieces) <= room[:, receiver][:, None]).all(axis=0)
        covers = fits & (pieces.seconds >= need[:, None]).all(axis=0)
        if not fits.any() or receiver == sender:
            return False
        rows = pieces.rows
        best = np.argmin(np.where(covers, rows, np.iinfo(np.int64).max)) if covers.any() else np.argmax(fits * rows)
        return self._hand_over(sender, pieces, np.array([best]), receiver)

    def _exchange(self, sender: int, pieces: Pieces, need: np.ndarray, room: np.ndarray, free: np.ndarray) -> bool:
        """Exchanges a piece of the sender for a smaller piece of a receiver; returns whether pieces were exchanged.

        Receivers are tried from most room to least. At the first with a pair of pieces that fits, the fitting pair with
        fewest rows is taken."""
        # ``lost`` and ``gained``: [K, given piece, taken piece] seconds that the sender loses and the receiver gains.
        given = pieces.shortest(_MOST_EXCHANGED)
        for receiver in self._falling(free)[:_PARTNERS].tolist():
            theirs = self.state.pieces_of(receiver)
            taken = theirs.shortest(_MOST_EXCHANGED)
            taken_seconds = self.state.on(sender, receiver, theirs)[:, taken]
            given_seconds = self.state.on(receiver, sender, pieces)[:, given]
            lost = pieces.seconds[:, given][:, :, None] - taken_seconds[:, None, :]
            gained = given_seconds[:, :, None] - theirs.seconds[:, taken][:, None, :]
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
        """Returns [N] the ranks whose ``worth`` [R] is above 0, highest first. Ranks of equal worth are in
        ``state.order``."""
        # numpy sorts a nearly sorted array faster, so the sort begins with the order that the last call found. If this
        # leaves ranks of equal worth in the wrong order, the sort begins with ``state.order`` instead.
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
        """Returns the rank with least room among those with room for ``wanted``; if there is none, the rank with most
        room."""
        order = self.state.order
        fits = np.where(free[order] >= wanted, free[order], np.inf)
        at = int(np.argmin(fits)) if np.isfinite(fits).any() else int(np.argmax(free[order]))
        return int(order[at])

    def _move_part(self, sender: int, piece: int, need: np.ndarray, room: np.ndarray, free: np.ndarray) -> bool:
        """Cuts ranges out of a piece for the cheapest receivers; returns whether this worked.

        Servers that would then read too many k,v rows are receivers only if no other server can take a range."""
        state = self.state
        pieces = state.pieces_of(sender)
        document, start, stop = pieces.place[:, piece].tolist()
        excess = Excess(start, stop, pieces.seconds[:, piece].tolist(), need.tolist())
        may_keep = state.may_keep(document, stop)
        may_keep |= free <= _LEAST_ROOM  # these ranks get no cut range in any case
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
        """Returns the ranks with room, first those to which few bytes travel for each second of work.

        If a range takes t seconds and a byte has the price p, a second of work costs about p / sqrt(t). A rank's room
        limits t. So ranks are sorted by room / p², highest first. For a rank that already has k,v rows of the document,
        p is lower."""
        state, network = self.state, self.state.links.network_price
        distant, q_price, squared = self._prices_from(int(state.node[sender]))
        worth = np.where(free > _LEAST_ROOM, free, 0.0) / squared
        sharing, had = state.sharers(document)
        worth[sharing] /= (1.0 - _KV_SHARE * np.minimum(1.0, had / stop)) ** 2
        ranks = self._falling(worth)

        def price(low: np.ndarray, ends: np.ndarray, chosen: list[int]) -> np.ndarray:
            # Receiver i computes the rows from ends[i − 1] (the first from ``low``) to ends[i]. Each row has the
            # price each[i]. The sum of these prices over i is Σ ends · rises − low · each[0].
            to = ranks.take(chosen)
            each = q_price.take(to)
            rises = each.copy()
            rises[:-1] -= each[1:]
            of_keys = self.kv_bytes * state.kv_rows(document, to, ends, network)
            return np.asarray((ends * rises).sum(axis=-1) - low * each[0] + of_keys)

        return Receivers(ranks, room.take(ranks, axis=1), distant.take(ranks), price)

    def _prices_from(self, node: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns three [R] arrays for a sender on ``node``: 1 for ranks on another node, else 0; the price of a query
        row; and the squared price of a byte. A byte within a node has price 1."""
        if node not in self.prices:
            distant = (self.state.node != node).astype(np.float64)
            price = np.where(distant, self.state.links.network_price, 1.0)
            self.prices[node] = distant, self.q_bytes * price, price**2
        return self.prices[node]


def _cheapest(price: np.ndarray) -> Iterator[int]:
    """Yields the indices of up to ``_TRIES`` pieces with finite ``price`` [P], cheapest first."""
    for _ in range(min(_TRIES, len(price))):
        best = int(price.argmin())
        if not price[best] < np.inf:
            return
        yield best
        price = price.copy()
        price[best] = np.inf
