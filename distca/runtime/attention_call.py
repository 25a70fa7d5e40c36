"""Core attention of one layer and nano-batch as a chain of five autograd nodes.

    enter: launch q,k,v → join → serve → launch o → leave: join o

Each transfer is a launch node and a join node. So backward *launches* the reverse transfer where forward joined, and
joins it where forward launched. Between the two, callers put the other nano-batch's compute (see ping_pong.py).

The tensors are fields of an :class:`AttentionCall`. Nodes pass each other only a graph token, which gives autograd the
edges of its graph: under *resend*, backward's buffers belong to another plan and have other shapes than forward's.
Which rows wait for backward, and where, is in ``kept_rows.py``. Sinks are added at home, where o and its log-sum-exp
arrive, so that servers need none of a layer's parameters.

Shape suffixes: N rows of the home rank (padding included), T query rows and U key/value rows of the server's buffers; H
query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch

from distca.attention.sink import sink_gradient, with_sink
from distca.runtime.device_routes import NanoRoutes
from distca.runtime.kept_rows import HomeRows, Keep, Resend, ServerRows, behind, moved
from distca.runtime.nodes import LayerCall, Node, graph_token
from distca.runtime.server import (
    AttentionPool,
    Sums,
    added_up,
    compute_backward,
    compute_forward,
    sums_of_before,
    task_regions,
)
from distca.transport import Part, RowMoves


class AttentionCall(LayerCall):
    """State of one layer's core attention for one nano-batch, from the launch of q,k,v to the end of its backward.

    Args:
        pool: the server pool.
        routes: this rank's routes of the nano-batch.
        layer: layer number, for the timeline.
        nano: 0 for ping, 1 for pong, for the timeline.
        before: the layer's call for the nano-batch before, whose k,v rows this one may need again.
    """

    def __init__(
        self,
        pool: AttentionPool,
        routes: NanoRoutes,
        layer: int,
        nano: int,
        before: AttentionCall | None = None,
    ) -> None:
        super().__init__(pool, layer, nano)
        self._routes = routes
        self._kept: Keep | Resend = Keep(routes) if pool.backward == "keep" else Resend(routes, pool.offload)
        self._server: ServerRows | None = None  # rows that this rank computes with, while it does
        self._arriving: list[torch.Tensor] = []  # rows that arrive at home, until they were joined
        self._gradients: tuple[torch.Tensor, ...] = ()
        self._sink: torch.Tensor | None = None
        self._home_rows = (0, 0)
        self._before = before if routes.forward.before else None
        self._later: Sums | None = {}  # gradients from the next nano-batch; None until they are there
        if self._before is not None:
            self._before._later = None

    # Public: the five nodes, called in this order.

    def launch_qkv(
        self, q_NHD: torch.Tensor, kv_N2GD: torch.Tensor, prefix_N2GD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Starts sending q and k,v rows; returns the graph token for :meth:`join_qkv`.

        ``prefix_N2GD`` has keys and values of the previous nano-batch that are sent again, ahead of its own. Their copy
        lives only while they travel."""
        return _Enter.apply(q_NHD, kv_N2GD, prefix_N2GD, self)

    def join_qkv(self, graph_token: torch.Tensor) -> torch.Tensor:
        """Waits for the rows that this server computes with."""
        return Node.apply(graph_token, self._join_qkv, self._launch_gradients)

    def serve(self, graph_token: torch.Tensor) -> torch.Tensor:
        """Computes this server's CA-tasks."""
        return Node.apply(graph_token, self._serve_forward, self._serve_backward)

    def launch_o(self, graph_token: torch.Tensor, sink_H: torch.Tensor | None = None) -> torch.Tensor:
        """Starts sending o rows home, with their log-sum-exp where the layer has sinks, which :meth:`join_o` adds."""
        self._sink = None if sink_H is None else sink_H.detach()
        return Node.apply(graph_token, self._launch_o, self._join_do)

    def join_o(self, graph_token: torch.Tensor, sink_H: torch.Tensor | None = None) -> torch.Tensor:
        """Waits for the o rows that live here; returns o_NHD, zero in padding rows. ``sink_H`` are the layer's
        sinks."""
        return _Leave.apply(graph_token, sink_H, self)

    # For a rank without tokens, which serves a backward phase but not the forward of the same micro-batches.

    @classmethod
    def for_backward(
        cls, pool: AttentionPool, routes: NanoRoutes, layer: int, nano: int, home: HomeRows
    ) -> AttentionCall:
        """A call that begins with its backward, under *resend*; ``home`` has no rows, in the shapes of the layer's."""
        call = cls(pool, routes, layer, nano)
        assert isinstance(call._kept, Resend)
        call._kept.home = home
        return call

    def backward_launch_do(self, do_NHD: torch.Tensor) -> None:
        """Starts sending q, k, v, o, lse and dO."""
        self._launch_do(do_NHD)

    def backward_serve(self) -> None:
        """Waits for the rows that were launched, computes this server's gradients and starts sending them home."""
        self._join_do()
        self._serve_backward()
        self._launch_gradients()

    def backward_join_gradients(self) -> None:
        """Waits for the gradients of rows that live here."""
        self._join_gradients()

    # Forward.

    def _launch_qkv(self, q_NHD: torch.Tensor, kv_N2GD: torch.Tensor, prefix_N2GD: torch.Tensor | None) -> None:
        route = self._routes.forward
        sent_kv = behind(prefix_N2GD, kv_N2GD)
        self._home_rows = (len(q_NHD), len(sent_kv))
        q, parts = moved(q_NHD, route.q_to_server, route.q_rows)
        kv, more = moved(sent_kv, route.kv_to_server, route.kv_rows)
        self._launch("q,k,v", "forward", *parts, *more)
        self._server = ServerRows(q, kv)
        self._kept.launched(q_NHD, kv_N2GD, prefix_N2GD)

    def _join_qkv(self) -> None:
        self._join("q,k,v", "forward")

    def _serve_forward(self) -> None:
        rows, route = self._server, self._routes.forward
        assert rows is not None
        regions = task_regions(rows.kv, self._kv_of_before(), route)
        with self._pool.timeline.serve(*self._where, "forward", route.kinds):
            rows.o, rows.lse = compute_forward(self._pool.kernel, route, rows.q, regions)
        self._kept.served(rows)

    def _kv_of_before(self) -> torch.Tensor | None:
        """The k,v rows that this server keeps of the nano-batch before; None where it needs none."""
        return None if self._before is None else self._before._kept.kv_on_server

    def _launch_o(self) -> None:
        rows, self._server = self._server, None
        assert rows is not None and rows.o is not None and rows.lse is not None
        sent = [rows.o]
        if self._sink is not None or self._kept.needs_lse_at_home:
            sent.append(rows.lse.contiguous())
        both = [self._moved_home(each, self._routes.forward.q_to_home) for each in sent]
        self._arriving = [arriving for arriving, _ in both]
        self._launch("o", "forward", *(part for _, parts in both for part in parts))

    def _join_o(self, has_backward: bool) -> torch.Tensor:
        self._join("o", "forward")
        o, *rest = self._arriving
        lse = rest[0] if rest else None
        self._arriving = []
        if self._sink is not None:
            assert lse is not None
            o, lse = with_sink(o, lse, self._sink)
        if has_backward:
            self._kept.joined(o, lse)
        # Autograd makes the returned tensor part of the graph, and what is kept for backward must not be in it. So a
        # new view is returned.
        return o.detach()

    # Backward.

    def _launch_do(self, do_NHD: torch.Tensor) -> torch.Tensor | None:
        """Starts sending what servers need for backward; returns the gradient of the sinks, None without sinks."""
        do_NHD = do_NHD.contiguous()
        of_sink = None
        if self._sink is not None:
            of_sink = sink_gradient(do_NHD, *self._kept.o_and_lse_at_home(), self._sink)
        parts, self._server, do = self._kept.parts_of_backward(do_NHD, self._sink is not None)
        self._launch(self._kept.sent_in_backward, "backward", *parts)
        self._gradients = (do,)
        return of_sink

    def _join_do(self) -> None:
        self._join(self._kept.sent_in_backward, "backward")

    def _serve_backward(self) -> None:
        (do,), route = self._gradients, self._routes.backward
        rows = self._kept.rows_for_backward(self._server)
        self._server = None
        regions = task_regions(rows.kv, self._kv_of_before(), route)
        assert rows.o is not None and rows.lse is not None
        with self._pool.timeline.serve(*self._where, "backward", route.kinds):
            dq, dkv = compute_backward(self._pool.kernel, route, do, rows.q, regions, rows.o, rows.lse)
        if self._before is not None:
            self._before._later, self._before = sums_of_before(dkv, route), None
        assert self._later is not None, "the next nano-batch has its backward first"
        self._gradients = (dq, added_up(dkv, self._later, route))
        self._later = {}
        self._kept.forget()

    def _launch_gradients(self) -> None:
        route = self._routes.backward
        dq, dkv = self._gradients
        dq_home, parts = self._moved_home(dq, route.q_to_home)
        dkv_home, more = moved(dkv, route.kv_to_home, self._home_rows[1], torch.Tensor.new_zeros)
        self._launch("dq,dk,dv", "backward", *parts, *more)
        self._gradients = (dq_home, dkv_home)

    def _join_gradients(self) -> tuple[torch.Tensor, ...]:
        self._join("dq,dk,dv", "backward")
        gradients, self._gradients = self._gradients, ()
        self._pool.timeline.open("post+pre", *self._where, "backward")
        return gradients

    # Shared.

    def _moved_home(self, rows: torch.Tensor, moves: RowMoves) -> tuple[torch.Tensor, list[Part]]:
        """Returns query rows at home, which an exchange fills, and the exchange's parts; padding rows are zero."""
        home, parts = moved(rows, moves, self._home_rows[0])
        if parts:
            home[moves.destination_rows :] = 0
        return home, parts


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_NHD: torch.Tensor, kv_N2GD: torch.Tensor, prefix_N2GD: torch.Tensor | None, call: AttentionCall
    ) -> torch.Tensor:
        ctx.call = call
        ctx.prefix_rows = None if prefix_N2GD is None else len(prefix_N2GD)
        prefix_N2GD = None if prefix_N2GD is None else prefix_N2GD.detach()
        call._launch_qkv(q_NHD.detach().contiguous(), kv_N2GD.detach().contiguous(), prefix_N2GD)
        return graph_token(q_NHD.device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        dq_NHD, dkv_N2GD = ctx.call._join_gradients()
        if ctx.prefix_rows is None:
            return dq_NHD, dkv_N2GD, None, None
        return dq_NHD, dkv_N2GD[ctx.prefix_rows :], dkv_N2GD[: ctx.prefix_rows], None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, sink_H: torch.Tensor | None, call: AttentionCall) -> torch.Tensor:
        ctx.call = call
        return call._join_o(token.requires_grad)

    @staticmethod
    def backward(ctx: Any, *do_NHD: torch.Tensor) -> Any:
        of_sink = ctx.call._launch_do(do_NHD[0])
        return graph_token(do_NHD[0].device), of_sink, None
