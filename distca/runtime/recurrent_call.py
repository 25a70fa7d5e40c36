"""Runs the core of a recurrent layer (linear attention, SSM) as five autograd nodes.

``ping_pong.py`` calls the nodes; without disaggregation :func:`recurrent_core` calls them.

    enter: launch halo → join → summarise → launch states → leave: join states, finish

- core: a short causal convolution, then a recurrence that updates a state S row by row. For each row, the recurrence
  gets q, k and v (outputs of the convolution), g and beta, and returns o. ``do`` is the gradient of o.
- nano-batch: a micro-batch is computed in one or two parts, ping (first) and pong (second).
- piece: a range of a document's rows on one rank in one nano-batch.
- halo: the few rows of the document right before a piece. The convolution of the piece's first rows reads them.
- summary: a piece turns the state S before it into A·S + B. The *transition* A and the *own state* B are its summary.
  Ranks send summaries, so that each rank can compute the states before its pieces.

Pieces are computed in these nodes:

| piece of its document | summarise | leave | leave, in backward | summarise, in backward |
|---|---|---|---|---|
| the only piece | forward | | backward | |
| the first | forward | | | backward |
| the last | | forward | backward | |
| an inner piece | only A and B | forward | only what its ``do`` adds to the gradient of S before it | backward |

Shape suffixes: N rows of this rank (padding included), C channels of the convolution, U halo rows that arrived; H
heads, K elements of a head of k, V elements of a head of v.
"""

from __future__ import annotations

from typing import Any

import torch

from distca.recurrent import CoreParameters, CoreRows, Recurrence, RecurrentKernel
from distca.recurrent.convolution import core_rows
from distca.recurrent.kernel import unwritten_like, wide
from distca.runtime.kept_rows import moved
from distca.runtime.nodes import LayerCall, Node, graph_token
from distca.runtime.recurrent_pieces import RankPieces, States, states_before
from distca.runtime.recurrent_routes import RecurrentRoutes, StateRoutes
from distca.runtime.server import AttentionPool


class RecurrentCall(LayerCall):
    """One recurrent layer's core for one nano-batch, forward and backward.

    Args:
        routes: this rank's pieces, and the rows and summaries to send and receive.
        what: the recurrence's formula and shapes.
        before: in pong, the same layer's call for ping; in ping None.
    """

    def __init__(
        self,
        pool: AttentionPool,
        routes: RecurrentRoutes,
        what: Recurrence,
        kernel: RecurrentKernel,
        layer: int,
        nano: int,
        before: RecurrentCall | None = None,
    ) -> None:
        super().__init__(pool, layer, nano, pool.homes or pool.transport)
        self._routes, self._what, self._before = routes, what, before
        self._pieces = RankPieces(routes, kernel)
        self._rows: tuple[torch.Tensor, ...] = ()  # mixed_NC, g and beta_NH of launch_halo
        self._parameters: CoreParameters | None = None
        self._halo: torch.Tensor | None = None  # halo_UC that arrived in this nano-batch
        # q, k, v, g and beta, and a second tensor. In forward it is o, from summarise to leave. In backward it is do,
        # from leave to summarise.
        self._core: tuple[CoreRows, torch.Tensor] | None = None
        self._arriving: list[torch.Tensor] = []  # own states and transitions that this rank receives
        # By piece, to be sent: own states; in backward, gradients of the states before pieces.
        self._own: dict[int, torch.Tensor] = {}
        self._transitions: dict[int, torch.Tensor] = {}  # by inner piece; sent in forward and again in backward
        self._states: dict[int, torch.Tensor] = {}  # by inner or last piece: the state before the piece
        # In ping, by document of which this rank has rows in pong: the state behind ping's rows, and its gradient.
        self._last_states: dict[int, torch.Tensor] = {}
        self._last_state_gradients: dict[int, torch.Tensor] = {}
        # In ping: gradients, from pong's convolution, of the halo rows that arrived in ping.
        self._halo_gradients_of_pong: torch.Tensor | None = None
        # In backward, outputs and inputs of the convolution: q, k and v; mixed_NC, halo rows and weights.
        self._graph: tuple[tuple[torch.Tensor, ...], list[torch.Tensor]] = ((), [])
        self._gradients: tuple[torch.Tensor, ...] = ()  # of mixed_NC, g, beta and halo rows
        self._core_gradients: CoreRows | None = None  # of q, k, v, g, beta

    # ``empty_layers.py`` calls the next four methods on a pipeline stage without a micro-batch. The stage takes part in
    # backward's exchanges, but has no autograd nodes.

    def begin_backward(self, rows: tuple[torch.Tensor, ...], parameters: CoreParameters) -> None:
        """Sets the fields that forward would have set. ``rows`` are mixed_NC, g and beta_NH with 0 rows."""
        self._rows, self._parameters, self._halo = rows, parameters, rows[0]

    def backward_launch_do(self, do_NHV: torch.Tensor) -> None:
        """Starts sending gradients of states."""
        self._launch_state_gradients(do_NHV)

    def backward_serve(self) -> None:
        """Waits for gradients of states, and starts sending gradients of halo rows."""
        self._join_state_gradients()
        self._summarise_backward()
        self._launch_halo_gradients()

    def backward_join_gradients(self) -> None:
        self._join_halo_gradients()

    # The five nodes, in the order in which they must be called. All but the last return a *graph token* for the next
    # node: a dummy scalar that gives autograd an edge between the two nodes.

    def launch_halo(self, mixed_NC: torch.Tensor, g: torch.Tensor, beta_NH: torch.Tensor) -> torch.Tensor:
        """Starts sending halo rows.

        Args:
            mixed_NC: the convolution's input: q, k and v side by side.
            g: g_NH, 0 or less. A row multiplies the state by exp(g).
            beta_NH: factors on what each row adds to the state.
        """
        token: torch.Tensor = _Enter.apply(mixed_NC, g, beta_NH, self)
        return token

    def join_halo(self, token: torch.Tensor) -> torch.Tensor:
        joined: torch.Tensor = Node.apply(token, self._join_halo, self._launch_halo_gradients)
        return joined

    def summarise(self, token: torch.Tensor, parameters: CoreParameters) -> torch.Tensor:
        """Computes the pieces that are first in their documents, and the summaries of inner pieces."""
        done: torch.Tensor = _Summarise.apply(token, parameters.kernel, parameters.bias, parameters.skip, self)
        return done

    def launch_states(self, token: torch.Tensor) -> torch.Tensor:
        launched: torch.Tensor = Node.apply(token, self._launch_states, self._join_state_gradients)
        return launched

    def join_states(self, token: torch.Tensor) -> torch.Tensor:
        """Waits for summaries and computes all other pieces; returns o_NHV, zero in padding rows."""
        o: torch.Tensor = _Leave.apply(token, self)
        return o

    # Forward.

    def _launch_halo(self, mixed_NC: torch.Tensor, g: torch.Tensor, beta_NH: torch.Tensor) -> None:
        self._rows = mixed_NC, g, beta_NH
        given, moves = mixed_NC.index_select(0, self._routes.given), self._routes.halo_to_pieces
        self._halo, parts = moved(given, moves, moves.destination_rows)
        self._launch("halo", "forward", *parts)

    def _join_halo(self) -> None:
        self._join("halo", "forward")

    def _summarise(self, parameters: CoreParameters) -> None:
        self._parameters = parameters
        with self._pool.timeline.compute("summarise", *self._where, "forward"):
            rows, pieces = self._core_rows(), self._pieces
            o_NHV = unwritten_like(rows.v, pieces.rows)
            pieces.forward(rows, pieces.only, {}, o_NHV, wanted=False)
            own, self._transitions = pieces.inner_summaries(rows)
            self._own = dict(zip(pieces.first, pieces.forward(rows, pieces.first, {}, o_NHV), strict=True)) | own
        self._core = rows, o_NHV

    def _launch_states(self) -> None:
        self._send_states(self._routes.forward, "states", "forward")

    def _join_states(self, has_backward: bool) -> torch.Tensor:
        self._join("states", "forward")
        assert self._core is not None and self._parameters is not None
        (rows, o_NHV), self._core = self._core, None
        with self._pool.timeline.compute("finish", *self._where, "forward"):
            passed: States = {}
            if self._before is not None:
                passed, self._before._last_states = self._before._last_states, {}
            self._states, self._last_states = states_before(
                self._take_arrived(), self._routes.forward, passed, backward=False
            )
            for numbers in (self._pieces.inner, self._pieces.last):
                self._pieces.forward(rows, numbers, self._states, o_NHV, wanted=False)
            if self._parameters.skip is not None:
                o_NHV += (self._parameters.skip[:, None] * rows.v).to(o_NHV.dtype)
        if not has_backward:
            self._rows, self._states, self._transitions = (), {}, {}
        return o_NHV

    # Backward.

    def _launch_state_gradients(self, do_NHV: torch.Tensor) -> None:
        with self._pool.timeline.compute("summarise", *self._where, "backward"):
            rows, do_NHV = self._core_rows(differentiable=True), do_NHV.contiguous()
            pieces = self._pieces
            gradients = rows.unwritten(pieces.rows)
            pieces.backward(rows, pieces.only, {}, do_NHV, {}, gradients, wanted=False)
            before_last = pieces.backward(rows, pieces.last, self._states, do_NHV, {}, gradients)
            self._own = dict(zip(pieces.last, before_last, strict=True))
            self._own |= pieces.inner_state_gradients(rows, do_NHV)
        self._core, self._core_gradients = (rows, do_NHV), gradients
        self._send_states(self._routes.backward, "dstates", "backward")

    def _join_state_gradients(self) -> None:
        self._join("dstates", "backward")

    def _summarise_backward(self) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients of the convolution's weight and bias, and of ``skip``; None for an absent parameter."""
        assert self._core is not None and self._core_gradients is not None and self._parameters is not None
        (rows, do_NHV), gradients = self._core, self._core_gradients
        with self._pool.timeline.compute("finish", *self._where, "backward"):
            behind, passed = states_before(
                self._take_arrived(), self._routes.backward, self._last_state_gradients, backward=True
            )
            self._last_state_gradients = {}
            if self._before is not None:
                self._before._last_state_gradients = passed
            for numbers in (self._pieces.first, self._pieces.inner):
                self._pieces.backward(rows, numbers, self._states, do_NHV, behind, gradients, wanted=False)
            skip, of_skip = self._parameters.skip, None
            if skip is not None:
                of_skip = (do_NHV * rows.v).sum((0, 2), dtype=wide(do_NHV.dtype)).to(skip.dtype)
                gradients.v.add_((skip[:, None] * do_NHV).to(gradients.v.dtype))
            of_kernel, of_bias = self._convolution_backward(gradients)
        self._core = self._core_gradients = None
        self._states, self._transitions = {}, {}
        return of_kernel, of_bias, of_skip

    def _convolution_backward(self, gradients: CoreRows) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        (outputs, leaves), self._graph = self._graph, ((), [])
        wanted = gradients.q, gradients.k, gradients.v
        found = torch.autograd.grad(outputs, leaves, wanted, materialize_grads=True)
        # found[1] has the gradients of halo rows. In pong, those of halo rows that arrived in ping come first.
        of_halo = found[1]
        if self._before is not None:
            at = len(of_halo) - self._routes.halo_to_pieces.destination_rows
            self._before._halo_gradients_of_pong, of_halo = of_halo[:at], of_halo[at:]
        elif self._halo_gradients_of_pong is not None:
            of_halo = of_halo + self._halo_gradients_of_pong
        self._gradients = found[0], gradients.g, gradients.beta, of_halo
        self._before = self._halo = self._halo_gradients_of_pong = None
        self._rows = ()
        return found[2], found[3] if len(found) == 4 else None

    def _launch_halo_gradients(self) -> None:
        *others, of_halo = self._gradients
        moves = self._routes.halo_to_home
        of_given, parts = moved(of_halo.contiguous(), moves, len(self._routes.given), torch.Tensor.new_zeros)
        self._launch("dhalo", "backward", *parts)
        self._gradients = (*others, of_given)

    def _join_halo_gradients(self) -> tuple[torch.Tensor, ...]:
        self._join("dhalo", "backward")
        (of_mixed, of_g, of_beta, of_given), self._gradients = self._gradients, ()
        of_mixed.index_add_(0, self._routes.given, of_given)
        # Autograd now runs backward of the parts between this core and the previous layer's.
        self._pool.timeline.open("post+pre", *self._where, "backward")
        return of_mixed, of_g, of_beta

    # Shared.

    def _halo_rows(self) -> torch.Tensor:
        assert self._halo is not None
        if self._before is None:
            return self._halo
        assert self._before._halo is not None, "ping's backward came before pong's"
        return torch.cat((self._before._halo, self._halo))

    def _core_rows(self, differentiable: bool = False) -> CoreRows:
        """Computes q, k and v by the convolution; ``differentiable`` records it for :meth:`_convolution_backward`."""
        assert self._parameters is not None
        (mixed, g, beta), given = self._rows, self._parameters
        leaves = [each.detach() for each in (mixed, self._halo_rows(), given.kernel, given.bias) if each is not None]
        with torch.set_grad_enabled(differentiable):
            for leaf in leaves:
                leaf.requires_grad_(differentiable)
            parameters = CoreParameters(*leaves[2:])
            rows = core_rows(leaves[0], g, beta, leaves[1], parameters, self._routes.pieces, self._what)
        if differentiable:
            self._graph = (rows.q, rows.k, rows.v), leaves
        return CoreRows(*(each.detach() for each in rows.all))

    def _send_states(self, routes: StateRoutes, what: str, direction: str) -> None:
        mixed_NC = self._rows[0]
        self._arriving, parts = [], []
        for by_piece, numbers, shape, moves in (
            (self._own, routes.sends_state, self._what.state_shape, routes.states),
            (self._transitions, routes.sends_transition, self._what.transition_shape, routes.transitions),
        ):
            empty = torch.empty(0, *shape, dtype=wide(mixed_NC.dtype), device=mixed_NC.device)
            sent = torch.stack([by_piece[each] for each in numbers]) if numbers else empty
            arriving, more = moved(sent, moves, moves.destination_rows)
            self._arriving.append(arriving)
            parts += more
        self._own = {}
        self._launch(what, direction, *parts)

    def _take_arrived(self) -> list[torch.Tensor]:
        arrived, self._arriving = self._arriving, []
        return arrived


def recurrent_core(
    pool: AttentionPool,
    routes: RecurrentRoutes,
    what: Recurrence,
    kernel: RecurrentKernel,
    layer: int,
    parameters: CoreParameters,
    mixed_NC: torch.Tensor,
    g: torch.Tensor,
    beta_NH: torch.Tensor,
) -> torch.Tensor:
    """Runs the five nodes for a whole micro-batch, one after the other; returns o_NHV. ``g`` is g_NH."""
    call = RecurrentCall(pool, routes, what, kernel, layer, 0)
    token = call.summarise(call.join_halo(call.launch_halo(mixed_NC, g, beta_NH)), parameters)
    return call.join_states(call.launch_states(token))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed_NC: torch.Tensor, g: torch.Tensor, beta_NH: torch.Tensor, call: RecurrentCall
    ) -> torch.Tensor:
        ctx.call = call
        call._launch_halo(*(each.detach().contiguous() for each in (mixed_NC, g, beta_NH)))
        return graph_token(mixed_NC.device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return *ctx.call._join_halo_gradients(), None


class _Summarise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        token: torch.Tensor,
        kernel: torch.Tensor,
        bias: torch.Tensor | None,
        skip: torch.Tensor | None,
        call: RecurrentCall,
    ) -> torch.Tensor:
        ctx.call = call
        bias, skip = (None if each is None else each.detach() for each in (bias, skip))
        call._summarise(CoreParameters(kernel.detach(), bias, skip))
        return graph_token(token.device)

    @staticmethod
    def backward(ctx: Any, *tokens: torch.Tensor) -> Any:
        return graph_token(tokens[0].device), *ctx.call._summarise_backward(), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, call: RecurrentCall) -> torch.Tensor:
        ctx.call = call
        return call._join_states(token.requires_grad)

    @staticmethod
    def backward(ctx: Any, *do_NHV: torch.Tensor) -> Any:
        ctx.call._launch_state_gradients(do_NHV[0])
        return graph_token(do_NHV[0].device), None
