"""The rows of one layer and nano-batch that wait for backward.

A *home* is a rank in its role of holding rows of documents; a *server* is a rank that computes attention for homes.
With *keep*, servers hold q, k, v and lse (log-sum-exp of the scores) of their tasks until backward. With *resend*,
homes hold q, k, v, o and lse of their rows and send them once more, perhaps to other servers. The classes
:class:`Keep` and :class:`Resend` have the same methods; an ``AttentionCall`` (attention_call.py) has one of them.

Shape suffixes: N rows of the home rank, T query rows and U key/value rows of a server; H query heads, G key/value
heads, D head dimension; 2 stands for k and v. A sink is a learned score of a head that takes a part of each softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from distca.attention.sink import scaled
from distca.device.offload import Offload, Parked, taken
from distca.runtime.device_routes import NanoRoutes
from distca.transport import Part, RowMoves
from distca.transport.gather_scatter import move_rows


@dataclass
class ServerRows:
    """Rows in a server's buffers.

    Attributes:
        q: q_THD.
        kv: kv_U2GD.
        o: o_THD, once it is computed.
        lse: lse_TH, once it is computed.
    """

    q: torch.Tensor
    kv: torch.Tensor
    o: torch.Tensor | None = None
    lse: torch.Tensor | None = None


@dataclass
class HomeRows:
    """Rows that live on this rank, on its device or in host memory.

    Attributes:
        q: q_NHD.
        kv: kv_N2GD.
        prefix: in pong, ping's keys and values of documents that pong continues; None for none.
        o: o_NHD with sinks, once it came home.
        lse: lse_NH with sinks, once it came home.
    """

    q: torch.Tensor | Parked
    kv: torch.Tensor | Parked
    prefix: torch.Tensor | Parked | None = None
    o: torch.Tensor | Parked | None = None
    lse: torch.Tensor | Parked | None = None


def moved(
    source: torch.Tensor, moves: RowMoves, rows: int, new: Callable[..., torch.Tensor] = torch.Tensor.new_empty
) -> tuple[torch.Tensor, list[Part]]:
    """Makes the destination of one tensor's exchange; nothing is sent yet.

    Args:
        source: contiguous rows to send.
        moves: where they go.
        rows: number of rows that this rank gets.
        new: makes the destination, as ``torch.Tensor.new_empty`` does.

    Returns:
        The destination, and in a list the part of an exchange that fills it. If no row moves between ranks or places,
        the destination is a view of ``source``, and the list is empty.
    """
    if moves.in_place and rows <= len(source):
        return source[:rows], []
    arriving = new(source, (rows, *source.shape[1:]))
    return arriving, [Part(source, arriving, moves)]


class Keep:
    """Servers keep q, k, v, lse and o of their tasks, and homes send only dO; with sinks also lse.

    A server does not keep o of rows that it computed for itself: the same rank has them as a home, where the output
    projection keeps them anyway.

    Args:
        routes: this rank's routes of the nano-batch.
    """

    sent_in_backward = "dO"
    needs_lse_at_home = False

    def __init__(self, routes: NanoRoutes) -> None:
        self._route = routes.forward
        self._server: ServerRows | None = None
        self._sent_o: torch.Tensor | None = None  # o of rows that this server computed for others, before sinks
        self._home_o: torch.Tensor | None = None  # o_NHD of this rank's home rows, after sinks
        self._home_lse: torch.Tensor | None = None  # lse_NH of this rank's home rows after sinks; None without sinks
        self._lse_with_sinks: torch.Tensor | None = None  # lse_TH after sinks, which homes send with dO

    @property
    def kv_on_server(self) -> torch.Tensor:
        """kv_U2GD of this server; pong's tasks read it in ping's object. Ping and pong are a micro-batch's two
        parts."""
        assert self._server is not None
        return self._server.kv

    def launched(self, q_NHD: torch.Tensor, kv_N2GD: torch.Tensor, prefix_N2GD: torch.Tensor | None) -> None:
        """Is called with this rank's home rows when they are sent; keeps none of them."""

    def served(self, rows: ServerRows) -> None:
        """Keeps the rows of the tasks that this server has computed."""
        self._server = rows

    def joined(self, o_NHD: torch.Tensor, lse_NH: torch.Tensor | None) -> None:
        """Keeps the outputs that came home, after sinks; it is called only if a backward will follow."""
        rows = self._server
        assert rows is not None and rows.o is not None
        self._sent_o, rows.o = rows.o.index_select(0, self._route.q_to_home.send_index), None
        self._home_o, self._home_lse = o_NHD, lse_NH

    def o_and_lse_at_home(self) -> tuple[torch.Tensor, torch.Tensor]:
        """o_NHD and lse_NH after sinks."""
        assert self._home_o is not None and self._home_lse is not None
        return self._home_o, self._home_lse

    def parts_of_backward(
        self, do_NHD: torch.Tensor, has_sinks: bool
    ) -> tuple[list[Part], ServerRows | None, torch.Tensor]:
        """Returns the parts to send to servers, None as no other rows arrive, and this server's do_THD."""
        route = self._route
        do, parts = moved(do_NHD, route.q_to_server, route.q_rows)
        if has_sinks:
            assert self._home_lse is not None
            self._lse_with_sinks, more = moved(self._home_lse.contiguous(), route.q_to_server, route.q_rows)
            parts += more
        return parts, None, do

    def rows_for_backward(self, arrived: ServerRows | None) -> ServerRows:
        """All rows of this server's tasks, with o and lse after sinks.

        o is assembled from the rows that were computed for others and, for this rank's own rows, from o at home."""
        # The kept rows are o before sinks. A sink scales o by exp(lse before sinks − lse after sinks).
        rows, route, sent, after = self._server, self._route, self._sent_o, self._lse_with_sinks
        assert rows is not None and sent is not None and self._home_o is not None and rows.lse is not None
        if route.q_to_server.in_place:
            return ServerRows(rows.q, rows.kv, self._home_o[: route.q_rows], rows.lse if after is None else after)
        elsewhere = route.q_to_home.send_index
        if after is not None:
            sent = scaled(sent, torch.exp(rows.lse.index_select(0, elsewhere) - after.index_select(0, elsewhere)))
        o = sent.new_empty(route.q_rows, *sent.shape[1:])
        move_rows(sent, None, o, elsewhere)
        route.q_to_server.copy_kept(self._home_o, o)
        return ServerRows(rows.q, rows.kv, o, rows.lse if after is None else after)

    def forget(self) -> None:
        """Drops all rows; the gradients have been computed."""
        self._server = self._sent_o = self._home_o = self._home_lse = self._lse_with_sinks = None


class Resend:
    """Homes keep q, k, v, o and lse of their rows and send them again with dO, to the servers of the backward plan.

    Args:
        routes: this rank's routes of the nano-batch.
        offload: host memory in which the rows wait; None keeps them on the device.
    """

    sent_in_backward = "q,k,v,o,dO"
    needs_lse_at_home = True

    def __init__(self, routes: NanoRoutes, offload: Offload | None) -> None:
        self._route, self._offload = routes.backward, offload
        self.home: HomeRows | None = None

    @property
    def kv_on_server(self) -> torch.Tensor:
        """Raises AssertionError, since servers keep no rows."""
        raise AssertionError("with resend, servers keep no rows of ping for pong")

    def launched(self, q_NHD: torch.Tensor, kv_N2GD: torch.Tensor, prefix_N2GD: torch.Tensor | None) -> None:
        """Keeps this rank's home rows when they are sent."""
        self.home = HomeRows(q_NHD, kv_N2GD, prefix_N2GD)

    def served(self, rows: ServerRows) -> None:
        """Is called with the rows that this server has computed; keeps none of them."""

    def joined(self, o_NHD: torch.Tensor, lse_NH: torch.Tensor | None) -> None:
        """Keeps the outputs that came home, after sinks; it is called only if a backward will follow.

        All rows then begin to move to host memory, if they are offloaded."""
        assert self.home is not None and lse_NH is not None
        self.home.o, self.home.lse = o_NHD, lse_NH
        if self._offload is not None:
            for name in ("q", "kv", "o", "lse", "prefix"):
                if (each := getattr(self.home, name)) is not None:
                    setattr(self.home, name, self._offload.park(taken(each)))

    def o_and_lse_at_home(self) -> tuple[torch.Tensor, torch.Tensor]:
        """o_NHD and lse_NH after sinks; offloaded ones come back to the device and stay there."""
        home = self.home
        assert home is not None and home.o is not None and home.lse is not None
        home.o, home.lse = taken(home.o), taken(home.lse)
        return home.o, home.lse

    def parts_of_backward(
        self, do_NHD: torch.Tensor, has_sinks: bool
    ) -> tuple[list[Part], ServerRows | None, torch.Tensor]:
        """Returns the parts to send to servers, the rows that this server gets, and its do_THD."""
        home, route = self.home, self._route
        assert home is not None and home.o is not None and home.lse is not None
        q, kv, o, lse = (taken(each) for each in (home.q, home.kv, home.o, home.lse))
        kv = behind(None if home.prefix is None else taken(home.prefix), kv)
        do, parts = moved(do_NHD, route.q_to_server, route.q_rows)
        arriving = []
        for rows, moves, count in (
            (q, route.q_to_server, route.q_rows),
            (kv, route.kv_to_server, route.kv_rows),
            (o, route.q_to_server, route.q_rows),
            (lse, route.q_to_server, route.q_rows),
        ):
            arrived, more = moved(rows, moves, count)
            arriving.append(arrived)
            parts += more
        self.home = None
        return parts, ServerRows(*arriving), do

    def rows_for_backward(self, arrived: ServerRows | None) -> ServerRows:
        """The rows that this server got."""
        assert arrived is not None
        return arrived

    def forget(self) -> None:
        """Does nothing, since the home dropped its rows when it sent them."""


def behind(prefix_N2GD: torch.Tensor | None, kv_N2GD: torch.Tensor) -> torch.Tensor:
    """Ping's key/value rows that pong needs again, if any, and behind them the nano-batch's own."""
    return kv_N2GD if prefix_N2GD is None else torch.cat((prefix_N2GD, kv_N2GD))
