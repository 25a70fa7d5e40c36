"""Core attention of one layer and nano-batch as a chain of five autograd nodes.

    launch q,k,v → join q,k,v → serve → launch o → join o

- home: a rank that holds rows of documents. It sends q, k and v of these rows, and gets o back.
- server: a rank that computes attention for homes, in the node ``serve``. Most ranks are both.
- nano-batch: a whole micro-batch, or one of its two parts, ping (first) and pong (second).
- join: the wait for a transfer that an earlier node has launched. Between launch and join, ``ping_pong.py`` runs
  compute of the other nano-batch.
- graph token: a dummy scalar that gives autograd an edge from node to node. The AttentionCall holds q, k, v and o.
- keep: servers keep q, k and v until backward. Resend: homes keep q, k and v, and send them again in backward.
- sink: a learned number, one more score in a head's softmax. Homes apply sinks to o and lse that come back.

Backward runs the nodes in reverse order. A node that joined in forward launches in backward, and a node that launched
in forward joins in backward.

Shape suffixes: N rows of the home (padding included), T query rows and U key/value rows of the server; H query heads, G
key/value heads, D head dimension; 2 stands for k and v (``server.py`` has the shape if values are narrower than keys).
lse is the log-sum-exp of scores.
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
    """One layer's core attention for one nano-batch, forward and backward.

    Args:
        nano: 0 for ping or a whole micro-batch, 1 for pong.
        before: in pong, the layer's call for ping, whose k,v rows pong may read; None in ping.
    """

    def __init__(
        self,
        pool: AttentionPool,
        routes: NanoRoutes,
        layer: int,
        nano: int,
        before: AttentionCall | None = None,
    ) -> None:
        super().__init__(pool, layer, nano, pool.transport)
        self._routes = routes
        self._kept: Keep | Resend = Keep(routes) if pool.backward == "keep" else Resend(routes, pool.offload)
        self._server: ServerRows | None = None  # rows that arrive on this server, until attention is computed
        self._arriving: list[torch.Tensor] = []  # o at home, and perhaps lse, from launch_o to join_o
        self._gradients: tuple[torch.Tensor, ...] = ()  # dO, later dq and dkv, between two nodes
        self._sink: torch.Tensor | None = None
        self._home_rows = (0, 0)  # numbers of query rows and of k,v rows at home
        self._before = before if routes.forward.before else None
        # Gradients of this call's k,v rows from pong's backward. None until pong has computed them; {} if pong reads
        # none of these rows.
        self._gradients_of_pong: Sums | None = {}
        if self._before is not None:
            self._before._gradients_of_pong = None

    # The five nodes, in order. All but the last return the graph token for the next.

    def launch_qkv(
        self, q_NHD: torch.Tensor, kv_N2GD: torch.Tensor, prefix_N2GD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Starts sending q, k and v rows to servers.

        In pong, ``prefix_N2GD`` has keys and values of those rows of ping that queries of pong see. Servers that did
        not keep these rows get them again. No server keeps them with resend, or in layers with a window."""
        return _Enter.apply(q_NHD, kv_N2GD, prefix_N2GD, self)

    def join_qkv(self, graph_token: torch.Tensor) -> torch.Tensor:
        return Node.apply(graph_token, self._join_qkv, self._launch_gradients)

    def serve(self, graph_token: torch.Tensor) -> torch.Tensor:
        return Node.apply(graph_token, self._serve_forward, self._serve_backward)

    def launch_o(self, graph_token: torch.Tensor, sink_H: torch.Tensor | None = None) -> torch.Tensor:
        """Starts sending o home. Starts sending lse too, if the layer has sinks or homes keep lse for backward."""
        self._sink = None if sink_H is None else sink_H.detach()
        return Node.apply(graph_token, self._launch_o, self._join_do)

    def join_o(self, graph_token: torch.Tensor, sink_H: torch.Tensor | None = None) -> torch.Tensor:
        """Waits for this home's o and applies sinks; returns o_NHD, zero in padding rows."""
        return _Leave.apply(graph_token, sink_H, self)

    # Ranks of a pipeline stage without a micro-batch, and servers without a model, compute attention's backward for
    # other stages. They have no autograd nodes then, so ``empty_layers.py`` calls the next four methods.

    @classmethod
    def for_backward(
        cls, pool: AttentionPool, routes: NanoRoutes, layer: int, nano: int, home: HomeRows
    ) -> AttentionCall:
        """Returns a call that only runs backward, with resend; the tensors of ``home`` have 0 rows."""
        call = cls(pool, routes, layer, nano)
        assert isinstance(call._kept, Resend)
        call._kept.home = home
        return call

    def backward_launch_do(self, do_NHD: torch.Tensor) -> None:
        self._launch_do(do_NHD)

    def backward_serve(self) -> None:
        self._join_do()
        self._serve_backward()
        self._launch_gradients()

    def backward_join_gradients(self) -> None:
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
        """Returns the k,v rows that this server kept in ping, or None if the server reads none of them in pong."""
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
        # Autograd sets grad_fn on the returned tensor, and must not set it on the kept o.
        return o.detach()

    # Backward.

    def _launch_do(self, do_NHD: torch.Tensor) -> torch.Tensor | None:
        """Returns the sinks' gradient, or None without sinks."""
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
            self._before._gradients_of_pong, self._before = sums_of_before(dkv, route), None
        assert self._gradients_of_pong is not None, "pong's backward must run before ping's"
        self._gradients = (dq, added_up(dkv, self._gradients_of_pong, route))
        self._gradients_of_pong = {}
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
        # Autograd now runs the backward of what lies between the core of layer i - 1 and the core of this layer i:
        # "post+pre" in the timeline. In layer 0 only a "pre" comes before the core, but the name is the same.
        self._pool.timeline.open("post+pre", *self._where, "backward")
        return gradients

    def _moved_home(self, rows: torch.Tensor, moves: RowMoves) -> tuple[torch.Tensor, list[Part]]:
        """Returns a tensor for this home's query rows, zero in padding rows; and the transfers that fill the tensor."""
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
