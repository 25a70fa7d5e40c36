"""Core attention of one layer and nano-batch as a chain of five autograd nodes.

    enter: launch q,k,v → join → serve → launch o → leave: join o

Each transfer is a launch node and a join node, so backward *launches* the reverse transfer where forward joined, and
joins it where forward launched. Between the two, callers put the other nano-batch's compute (see ping_pong.py). The
tensors travel through an :class:`AttentionCall`; between the nodes only a graph token is passed, which carries the
graph's edges: under *resend* the backward's buffers are those of another plan and have other shapes than the forward's.

Shape suffixes: N rows of the home rank (padding included), T query rows and U key/value rows of the server's buffers, H
query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch

from distca.device.offload import Parked, taken
from distca.runtime.device_routes import NanoRoutes
from distca.runtime.server import (
    AttentionPool,
    Sums,
    added_up,
    serve_backward,
    serve_forward,
    sums_of_before,
    task_regions,
)
from distca.transport import Handle, Part, RowMoves
from distca.transport.gather_scatter import move_rows
from distca.transport.interface import sent_by


class AttentionCall:
    """State of one layer's core attention for one nano-batch, from the launch of q,k,v to the end of its backward.

    Args:
        pool: the server pool.
        routes: this rank's routes of the nano-batch.
        layer: layer number, for the timeline.
        nano: 0 for ping, 1 for pong, for the timeline.
        scale: factor on the attention scores.
        before: the call of the layer's half before this one, whose k,v rows this one may need again.
    """

    def __init__(
        self,
        pool: AttentionPool,
        routes: NanoRoutes,
        layer: int,
        nano: int,
        scale: float,
        before: AttentionCall | None = None,
    ) -> None:
        self._pool, self._routes, self._scale = pool, routes, scale
        self._where = (layer, nano)
        self._handle: Handle | None = None
        self._server: tuple[torch.Tensor, ...] = ()  # q, kv, o, lse rows on this server; without o once that was sent
        self._sent_o: tuple[torch.Tensor, ...] = ()  # o rows of this server that live elsewhere; o at home (keep)
        self._home: tuple[torch.Tensor | Parked, ...] = ()  # q, kv, o, lse rows that live here (resend)
        self._prefix: torch.Tensor | Parked | None = None  # a view of the previous nano-batch's kv rows (resend)
        self._gradients: tuple[torch.Tensor, ...] = ()
        self._home_rows = (0, 0)
        self._before = before if routes.forward.before else None
        self._later: Sums | None = {}  # gradients from the half behind this one; None until they are there
        if self._before is not None:
            self._before._later = None

    # Public: the five nodes, called in this order.

    def launch_qkv(
        self, q_NHD: torch.Tensor, kv_N2GD: torch.Tensor, prefix_N2GD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Start sending q and k,v rows; returns the graph token for :meth:`join_qkv`. ``prefix_N2GD``: keys and values
        of the previous nano-batch that are sent again, ahead of its own; not copied for longer than they travel."""
        return _Enter.apply(q_NHD, kv_N2GD, prefix_N2GD, self)

    def join_qkv(self, graph_token: torch.Tensor) -> torch.Tensor:
        """Wait for the rows that this server computes with."""
        return _Node.apply(graph_token, self._join_qkv, self._launch_gradients)

    def serve(self, graph_token: torch.Tensor) -> torch.Tensor:
        """Compute this server's CA-tasks."""
        return _Node.apply(graph_token, self._serve_forward, self._serve_backward)

    def launch_o(self, graph_token: torch.Tensor) -> torch.Tensor:
        """Start sending o rows home."""
        return _Node.apply(graph_token, self._launch_o, self._join_do)

    def join_o(self, graph_token: torch.Tensor) -> torch.Tensor:
        """Wait for the o rows that live here; returns o_NHD, zero in padding rows."""
        return _Leave.apply(graph_token, self)

    # For a rank without tokens, which serves a backward phase whose forward it served elsewhere or not at all.

    @classmethod
    def for_backward(
        cls,
        pool: AttentionPool,
        routes: NanoRoutes,
        layer: int,
        nano: int,
        scale: float,
        home: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> AttentionCall:
        """A call that begins with its backward; needs *resend*. ``home``: q, kv, o, lse rows that live here."""
        assert pool.backward == "resend"
        call = cls(pool, routes, layer, nano, scale)
        call._home, call._home_rows = home, (len(home[0]), len(home[1]))
        return call

    def backward_launch_do(self, do_NHD: torch.Tensor) -> None:
        """Start sending q, k, v, o, lse and dO."""
        self._launch_do(do_NHD)

    def backward_serve(self) -> None:
        """Wait for them, compute this server's gradients and start sending them home."""
        self._join_do()
        self._serve_backward()
        self._launch_gradients()

    def backward_join_gradients(self) -> None:
        """Wait for the gradients of rows that live here."""
        self._join_gradients()

    # Forward.

    def _launch_qkv(self, q_NHD: torch.Tensor, kv_N2GD: torch.Tensor, prefix_N2GD: torch.Tensor | None) -> None:
        route = self._routes.forward
        sent_kv = _behind(prefix_N2GD, kv_N2GD)
        self._home_rows = (len(q_NHD), len(sent_kv))
        q = q_NHD.new_empty(route.q_rows, *q_NHD.shape[1:])
        kv = kv_N2GD.new_empty(route.kv_rows, *kv_N2GD.shape[1:])
        self._launch("q,k,v", "forward", Part(q_NHD, q, route.q_to_server), Part(sent_kv, kv, route.kv_to_server))
        self._server = (q, kv)
        if self._pool.backward == "resend":
            self._home, self._prefix = (q_NHD, kv_N2GD), prefix_N2GD

    def _join_qkv(self) -> None:
        self._join("q,k,v", "forward")

    def _serve_forward(self) -> None:
        q, kv = self._server
        regions = task_regions(kv, self._kv_of_before(), self._routes.forward)
        with self._pool.timeline.serve(*self._where, "forward"):
            o, lse = serve_forward(self._pool.kernel, self._routes.forward, q, regions, self._scale)
        self._server = (q, kv, o, lse)

    def _kv_of_before(self) -> torch.Tensor | None:
        """Rows on this server of the half before."""
        return None if self._before is None else self._before._server[1]

    def _launch_o(self) -> None:
        _, _, o, lse = self._server
        o_home = self._rows_at_home(o, self._routes.forward.q_to_home, self._home_rows[0])
        parts = [Part(o, o_home, self._routes.forward.q_to_home)]
        if self._pool.backward == "resend":
            lse_home = self._rows_at_home(lse, self._routes.forward.q_to_home, self._home_rows[0])
            parts.append(Part(lse.contiguous(), lse_home, self._routes.forward.q_to_home))
            self._home += (o_home, lse_home)
            self._server = ()
        self._launch("o", "forward", *parts)
        self._output = o_home

    def _join_o(self, has_backward: bool) -> torch.Tensor:
        self._join("o", "forward")
        output = self._output
        del self._output
        if has_backward and self._pool.backward == "keep":
            self._keep_o_once(output)
        if has_backward and self._pool.offload is not None:
            self._home = tuple(self._pool.offload.park(taken(each)) for each in self._home)
            if self._prefix is not None:
                self._prefix = self._pool.offload.park(taken(self._prefix))
        # A fresh view: autograd makes the returned tensor part of the graph, and what is kept for backward must not be.
        return output.detach()

    def _keep_o_once(self, o_NHD: torch.Tensor) -> None:
        """Of the o rows on this server keep those that live elsewhere: the others are at home, where the output
        projection keeps them anyway."""
        q, kv, o, lse = self._server
        self._server = (q, kv, lse)
        self._sent_o = (o.index_select(0, self._routes.forward.q_to_home.send_index), o_NHD)

    def _o_of_server(self) -> torch.Tensor:
        """All o rows of this server again, from those that were sent and those at home."""
        route, (elsewhere, at_home) = self._routes.forward, self._sent_o
        o = elsewhere.new_empty(route.q_rows, *elsewhere.shape[1:])
        move_rows(elsewhere, None, o, route.q_to_home.send_index)
        route.q_to_server.copy_kept(at_home, o)
        return o

    # Backward.

    def _launch_do(self, do_NHD: torch.Tensor) -> None:
        route, do_NHD = self._routes.backward, do_NHD.contiguous()
        do = do_NHD.new_empty(route.q_rows, *do_NHD.shape[1:])
        parts = [Part(do_NHD, do, route.q_to_server)]
        if self._pool.backward == "resend":
            moves = (route.q_to_server, route.kv_to_server, route.q_to_server, route.q_to_server)
            rows = (route.q_rows, route.kv_rows, route.q_rows, route.q_rows)
            q, kv, o, lse = map(taken, self._home)
            home = (q, _behind(None if self._prefix is None else taken(self._prefix), kv), o, lse)
            self._server = tuple(x.new_empty(n, *x.shape[1:]) for x, n in zip(home, rows, strict=True))
            parts += [Part(*part) for part in zip(home, self._server, moves, strict=True)]
            self._home, self._prefix = (), None
        self._launch("dO" if self._pool.backward == "keep" else "q,k,v,o,dO", "backward", *parts)
        self._gradients = (do,)

    def _join_do(self) -> None:
        self._join("dO" if self._pool.backward == "keep" else "q,k,v,o,dO", "backward")

    def _serve_backward(self) -> None:
        (do,) = self._gradients
        if self._pool.backward == "keep":
            q, kv, lse = self._server
            o = self._o_of_server()
        else:
            q, kv, o, lse = self._server
        regions = task_regions(kv, self._kv_of_before(), self._routes.backward)
        with self._pool.timeline.serve(*self._where, "backward"):
            dq, dkv = serve_backward(self._pool.kernel, self._routes.backward, do, q, regions, o, lse, self._scale)
        if self._before is not None:
            self._before._later, self._before = sums_of_before(dkv, self._routes.backward), None
        assert self._later is not None, "the half behind this one has its backward first"
        self._gradients = (dq, added_up(dkv, self._later, self._routes.backward))
        self._server, self._sent_o, self._later = (), (), {}

    def _launch_gradients(self) -> None:
        route = self._routes.backward
        dq, dkv = self._gradients
        dq_home = self._rows_at_home(dq, route.q_to_home, self._home_rows[0])
        dkv_home = dkv.new_zeros(self._home_rows[1], *dkv.shape[1:])
        self._launch("dq,dk,dv", "backward", Part(dq, dq_home, route.q_to_home), Part(dkv, dkv_home, route.kv_to_home))
        self._gradients = (dq_home, dkv_home)

    def _join_gradients(self) -> tuple[torch.Tensor, ...]:
        self._join("dq,dk,dv", "backward")
        gradients, self._gradients = self._gradients, ()
        self._pool.timeline.open("post+pre", *self._where, "backward")
        return gradients

    # Shared.

    def _launch(self, what: str, direction: str, *parts: Part) -> None:
        self._handle = self._pool.transport.launch(parts)
        timeline = self._pool.timeline
        args = sent_by(self._pool.transport.rank, parts) if timeline.recording else None
        timeline.launched(what, self._handle, *self._where, direction, args)

    def _join(self, what: str, direction: str) -> None:
        assert self._handle is not None
        self._pool.timeline.joined(what, *self._where, direction)
        self._handle.wait()
        self._handle = None

    @staticmethod
    def _rows_at_home(like: torch.Tensor, moves: RowMoves, rows: int) -> torch.Tensor:
        """A home tensor that the exchange fills; padding rows beyond it are zero."""
        home = like.new_empty(rows, *like.shape[1:])
        home[moves.destination_rows :] = 0
        return home


def _behind(prefix_N2GD: torch.Tensor | None, kv_N2GD: torch.Tensor) -> torch.Tensor:
    return kv_N2GD if prefix_N2GD is None else torch.cat((prefix_N2GD, kv_N2GD))


def _graph_token(device: torch.device) -> torch.Tensor:
    """A scalar on the rows' device: the autograd engine runs a device's nodes in one thread, in reverse order of
    creation. Its value is never read."""
    return torch.empty((), device=device)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_NHD: torch.Tensor, kv_N2GD: torch.Tensor, prefix_N2GD: torch.Tensor | None, call: AttentionCall
    ) -> torch.Tensor:
        ctx.call = call
        ctx.prefix_rows = None if prefix_N2GD is None else len(prefix_N2GD)
        prefix_N2GD = None if prefix_N2GD is None else prefix_N2GD.detach()
        call._launch_qkv(q_NHD.detach().contiguous(), kv_N2GD.detach().contiguous(), prefix_N2GD)
        return _graph_token(q_NHD.device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        dq_NHD, dkv_N2GD = ctx.call._join_gradients()
        if ctx.prefix_rows is None:
            return dq_NHD, dkv_N2GD, None, None
        return dq_NHD, dkv_N2GD[ctx.prefix_rows :], dkv_N2GD[: ctx.prefix_rows], None


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph_token: torch.Tensor, forward: Any, backward: Any) -> torch.Tensor:
        ctx.backward_part = backward
        forward()
        return _graph_token(graph_token.device)

    @staticmethod
    def backward(ctx: Any, *graph_tokens: torch.Tensor) -> Any:
        ctx.backward_part()
        return _graph_token(graph_tokens[0].device), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph_token: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        ctx.call = call
        return call._join_o(graph_token.requires_grad)

    @staticmethod
    def backward(ctx: Any, *do_NHD: torch.Tensor) -> Any:
        ctx.call._launch_do(do_NHD[0])
        return _graph_token(do_NHD[0].device), None
