"""The rows that wait for backward: on the servers (*keep*), or at home, from where they are sent again (*resend*).

Shape suffixes as in ``attention_call.py``.
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
        lse: lse_TH, the log-sum-exp of every row's scores, once it is computed.
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
        prefix: keys and values of the previous nano-batch that were sent ahead of ``kv``; None for none.
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
    """Returns a tensor for the rows that arrive, and the part of an exchange that fills it.

    Where all rows stay in their places, the tensor is ``source`` itself, and there is no part.

    Args:
        source: contiguous rows that are sent.
        moves: where they go.
        rows: number of rows that arrive.
        new: makes the tensor, as ``torch.Tensor.new_empty`` does.
    """
    if moves.in_place and rows <= len(source):
        return source[:rows], []
    arriving = new(source, (rows, *source.shape[1:]))
    return arriving, [Part(source, arriving, moves)]


class Keep:
    """Servers keep q, k,v, o and log-sum-exp of their tasks, and home ranks send dO alone.

    Of o a server keeps only rows that live on other ranks. Its own rows are at home, where the output projection keeps
    them anyway."""

    sent_in_backward = "dO"
    needs_lse_at_home = False

    def __init__(self, routes: NanoRoutes) -> None:
        self._route = routes.forward
        self._server: ServerRows | None = None
        self._sent_o: torch.Tensor | None = None  # o rows of this server that live elsewhere, without sinks
        self._home_o: torch.Tensor | None = None
        self._home_lse: torch.Tensor | None = None  # lse_NH, kept where there are sinks
        self._lse_with_sinks: torch.Tensor | None = None  # lse_TH of this server's rows, from their homes

    @property
    def kv_on_server(self) -> torch.Tensor:
        """kv_U2GD."""
        assert self._server is not None
        return self._server.kv

    def launched(self, q_NHD: torch.Tensor, kv_N2GD: torch.Tensor, prefix_N2GD: torch.Tensor | None) -> None:
        """Notes rows of this rank that are on their way to servers; nothing is kept of them at home."""

    def served(self, rows: ServerRows) -> None:
        """Notes the rows of the tasks that this server computed."""
        self._server = rows

    def joined(self, o_NHD: torch.Tensor, lse_NH: torch.Tensor | None) -> None:
        """Notes the outputs that came home, where a backward will follow; o and lse are with sinks where there are
        some."""
        rows = self._server
        assert rows is not None and rows.o is not None
        self._sent_o, rows.o = rows.o.index_select(0, self._route.q_to_home.send_index), None
        self._home_o, self._home_lse = o_NHD, lse_NH

    def o_and_lse_at_home(self) -> tuple[torch.Tensor, torch.Tensor]:
        """o_NHD and lse_NH with sinks."""
        assert self._home_o is not None and self._home_lse is not None
        return self._home_o, self._home_lse

    def parts_of_backward(
        self, do_NHD: torch.Tensor, has_sinks: bool
    ) -> tuple[list[Part], ServerRows | None, torch.Tensor]:
        """Returns the parts to send to servers, the rows that arrive beside dO, and do_THD on this server."""
        route = self._route
        do, parts = moved(do_NHD, route.q_to_server, route.q_rows)
        if has_sinks:
            assert self._home_lse is not None
            self._lse_with_sinks, more = moved(self._home_lse.contiguous(), route.q_to_server, route.q_rows)
            parts += more
        return parts, None, do

    def rows_for_backward(self, arrived: ServerRows | None) -> ServerRows:
        """All rows of this server, with sinks; o is put together from the rows that were sent and those at home."""
        # Sinks change o by a factor: exp(lse without them − lse with them).
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
        """Drops all rows, as the gradients are computed."""
        self._server = self._sent_o = self._home_o = self._home_lse = self._lse_with_sinks = None


class Resend:
    """Home ranks keep q, k,v, o and log-sum-exp of their rows, and send them again with dO, to the backward plan's
    servers.

    Args:
        routes: this rank's routes of the nano-batch.
        offload: where the rows wait; None keeps them on the device.
    """

    sent_in_backward = "q,k,v,o,dO"
    needs_lse_at_home = True

    def __init__(self, routes: NanoRoutes, offload: Offload | None) -> None:
        self._route, self._offload = routes.backward, offload
        self.home: HomeRows | None = None

    @property
    def kv_on_server(self) -> torch.Tensor:
        """Raises AssertionError: servers keep no rows."""
        raise AssertionError("servers of resent rows keep none of the nano-batch before")

    def launched(self, q_NHD: torch.Tensor, kv_N2GD: torch.Tensor, prefix_N2GD: torch.Tensor | None) -> None:
        """Notes rows of this rank that are on their way to servers."""
        self.home = HomeRows(q_NHD, kv_N2GD, prefix_N2GD)

    def served(self, rows: ServerRows) -> None:
        """Keeps nothing of the tasks that this server computed."""

    def joined(self, o_NHD: torch.Tensor, lse_NH: torch.Tensor | None) -> None:
        """Notes the outputs that came home, where a backward will follow; o and lse are with sinks where there are
        some."""
        assert self.home is not None and lse_NH is not None
        self.home.o, self.home.lse = o_NHD, lse_NH
        if self._offload is not None:
            for name in ("q", "kv", "o", "lse", "prefix"):
                if (each := getattr(self.home, name)) is not None:
                    setattr(self.home, name, self._offload.park(taken(each)))

    def o_and_lse_at_home(self) -> tuple[torch.Tensor, torch.Tensor]:
        """o_NHD and lse_NH with sinks, on the device from now on."""
        home = self.home
        assert home is not None and home.o is not None and home.lse is not None
        home.o, home.lse = taken(home.o), taken(home.lse)
        return home.o, home.lse

    def parts_of_backward(
        self, do_NHD: torch.Tensor, has_sinks: bool
    ) -> tuple[list[Part], ServerRows | None, torch.Tensor]:
        """Returns the parts to send to servers, the rows that arrive beside dO, and do_THD on this server."""
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
        """The rows of this server, as they arrived."""
        assert arrived is not None
        return arrived

    def forget(self) -> None:
        """Does nothing: rows were dropped when they were sent."""


def behind(prefix_N2GD: torch.Tensor | None, kv_N2GD: torch.Tensor) -> torch.Tensor:
    """The key/value rows that are sent again, then the nano-batch's own."""
    return kv_N2GD if prefix_N2GD is None else torch.cat((prefix_N2GD, kv_N2GD))
