"""The rows that an attention call (``attention_call.py``) keeps from forward until backward.

- home: a rank that holds rows of documents.
- server: a rank that computes attention for homes. Most ranks are both.
- :class:`Keep`: servers keep q, k and v until backward.
- :class:`Resend`: homes keep q, k and v, and send them again in backward, perhaps to other servers.
- ping, pong: the two parts of a micro-batch. Each part has its own ``Keep`` or ``Resend``.
- sink: a learned number, one more score in a head's softmax. Homes apply sinks to o and lse that come back.

Shape suffixes: N rows of a home, T query rows and U key/value rows of a server; H query heads, G key/value heads, D
head dimension; 2 stands for k and v (``server.py`` has the shape if values are narrower than keys). lse is the
log-sum-exp of scores.
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
    """Rows on a server.

    Attributes:
        q: q_THD.
        kv: kv_U2GD.
        o: o_THD; None before attention is computed, and once :meth:`Keep.joined` has taken it.
        lse: lse_TH; None before attention is computed.
    """

    q: torch.Tensor
    kv: torch.Tensor
    o: torch.Tensor | None = None
    lse: torch.Tensor | None = None


@dataclass
class HomeRows:
    """Rows of which this rank is the home, on the device or in host memory.

    Attributes:
        q: q_NHD.
        kv: kv_N2GD.
        prefix: in pong, [rows, 2, G, D] keys and values of those rows of ping that queries of pong see; else None.
        o: o_NHD after sinks; None before it has come home.
        lse: lse_NH after sinks; None before it has come home.
    """

    q: torch.Tensor | Parked
    kv: torch.Tensor | Parked
    prefix: torch.Tensor | Parked | None = None
    o: torch.Tensor | Parked | None = None
    lse: torch.Tensor | Parked | None = None


def moved(
    source: torch.Tensor, moves: RowMoves, rows: int, new: Callable[..., torch.Tensor] = torch.Tensor.new_empty
) -> tuple[torch.Tensor, list[Part]]:
    """Makes the destination of a transfer; nothing is sent yet.

    Args:
        source: contiguous rows to send.
        moves: which rows go to which rank, and to which row of the destination there.
        rows: number of rows of the destination.
        new: the method of Tensor that makes the destination.

    Returns:
        The destination, and a list with the transfer that fills it. The list is empty if each row keeps its rank and
        index, and ``source`` has at least ``rows`` rows. Then the destination is a view of ``source``.
    """
    if moves.in_place and rows <= len(source):
        return source[:rows], []
    arriving = new(source, (rows, *source.shape[1:]))
    return arriving, [Part(source, arriving, moves)]


class Keep:
    """Servers keep q, k, v and lse, and o of rows whose home is another rank.

    Homes keep o of their rows. In backward, homes send dO to servers, and lse too if heads have sinks.
    """

    sent_in_backward = "dO"
    needs_lse_at_home = False

    def __init__(self, routes: NanoRoutes) -> None:
        self._route = routes.forward
        self._server: ServerRows | None = None
        self._sent_o: torch.Tensor | None = None  # o before sinks, of rows with another home
        self._home_o: torch.Tensor | None = None  # o_NHD after sinks
        self._home_lse: torch.Tensor | None = None  # lse_NH after sinks; None without sinks
        self._lse_with_sinks: torch.Tensor | None = None  # lse_TH after sinks, sent by homes in backward

    @property
    def kv_on_server(self) -> torch.Tensor:
        assert self._server is not None
        return self._server.kv

    def launched(self, q_NHD: torch.Tensor, kv_N2GD: torch.Tensor, prefix_N2GD: torch.Tensor | None) -> None:
        """Does nothing: servers keep this home's rows."""

    def served(self, rows: ServerRows) -> None:
        self._server = rows

    def joined(self, o_NHD: torch.Tensor, lse_NH: torch.Tensor | None) -> None:
        """Keeps o and lse after sinks. Callers call this method if backward will follow."""
        rows = self._server
        assert rows is not None and rows.o is not None
        self._sent_o, rows.o = rows.o.index_select(0, self._route.q_to_home.send_index), None
        self._home_o, self._home_lse = o_NHD, lse_NH

    def o_and_lse_at_home(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns o_NHD and lse_NH after sinks; heads must have sinks."""
        assert self._home_o is not None and self._home_lse is not None
        return self._home_o, self._home_lse

    def parts_of_backward(
        self, do_NHD: torch.Tensor, has_sinks: bool
    ) -> tuple[list[Part], ServerRows | None, torch.Tensor]:
        """Returns the transfers to start; None, as this server has kept q, k and v; and do_THD, dO's destination."""
        route = self._route
        do, parts = moved(do_NHD, route.q_to_server, route.q_rows)
        if has_sinks:
            assert self._home_lse is not None
            self._lse_with_sinks, more = moved(self._home_lse.contiguous(), route.q_to_server, route.q_rows)
            parts += more
        return parts, None, do

    def rows_for_backward(self, arrived: ServerRows | None) -> ServerRows:
        """Returns this server's rows, with o and lse after sinks."""
        # A sink scales o by exp(lse before sinks − lse after sinks). self._sent_o is not scaled yet.
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
        self._server = self._sent_o = self._home_o = self._home_lse = self._lse_with_sinks = None


class Resend:
    """Homes keep q, k, v, o and lse of their rows, and send them with dO to the servers that compute backward.

    Args:
        offload: host memory for kept rows; None leaves them on the device.
    """

    sent_in_backward = "q,k,v,o,dO"
    needs_lse_at_home = True

    def __init__(self, routes: NanoRoutes, offload: Offload | None) -> None:
        self._route, self._offload = routes.backward, offload
        self.home: HomeRows | None = None

    @property
    def kv_on_server(self) -> torch.Tensor:
        raise AssertionError("with resend, servers keep no rows of ping for pong")

    def launched(self, q_NHD: torch.Tensor, kv_N2GD: torch.Tensor, prefix_N2GD: torch.Tensor | None) -> None:
        self.home = HomeRows(q_NHD, kv_N2GD, prefix_N2GD)

    def served(self, rows: ServerRows) -> None:
        """Does nothing: servers keep no rows."""

    def joined(self, o_NHD: torch.Tensor, lse_NH: torch.Tensor | None) -> None:
        """Keeps o and lse after sinks. With ``offload``, copies of all kept rows to host memory start."""
        assert self.home is not None and lse_NH is not None
        self.home.o, self.home.lse = o_NHD, lse_NH
        if self._offload is not None:
            for name in ("q", "kv", "o", "lse", "prefix"):
                if (each := getattr(self.home, name)) is not None:
                    setattr(self.home, name, self._offload.park(taken(each)))

    def o_and_lse_at_home(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns o_NHD and lse_NH after sinks, on the device."""
        home = self.home
        assert home is not None and home.o is not None and home.lse is not None
        home.o, home.lse = taken(home.o), taken(home.lse)
        return home.o, home.lse

    def parts_of_backward(
        self, do_NHD: torch.Tensor, has_sinks: bool
    ) -> tuple[list[Part], ServerRows | None, torch.Tensor]:
        """Returns the transfers to start, and their destinations: this server's rows, and do_THD."""
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
        assert arrived is not None
        return arrived

    def forget(self) -> None:
        """Does nothing: :meth:`parts_of_backward` has dropped the rows."""


def behind(prefix_N2GD: torch.Tensor | None, kv_N2GD: torch.Tensor) -> torch.Tensor:
    return kv_N2GD if prefix_N2GD is None else torch.cat((prefix_N2GD, kv_N2GD))
