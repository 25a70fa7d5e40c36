"""Runs layers on two nano-batches in an order in which one computes while the other's rows travel.

A micro-batch is cut into two *nano-batches*, ping (0) and pong (1). A layer is cut at its core attention: ``pre`` runs
before, ``post`` after. Core attention, which is called *serve* here, may run on any rank: q, k and v are sent to that
rank, and o is sent back. A *launch* starts a transfer, and a *join* waits for its end. For most layers i, autograd
nodes of nano-batches 0 and 1 are created in this order:

    join q,k,v(i,0) · serve(i,0) · launch o(i,0) · join q,k,v(i,1) · serve(i,1) · launch o(i,1)
    join o(i,0) · post(i,0)+pre(i+1,0) · launch q,k,v(i+1,0) · join o(i,1) · post(i,1)+pre(i+1,1) · launch q,k,v(i+1,1)

The autograd engine runs ready nodes in reverse order of creation, so backward runs them from the last to the first.

- A recurrent layer (linear attention, SSM) has nodes in the same order with other transfers (``recurrent_call.py``).
- A layer that sends rows to experts has another second line, unless it is recomputed: both posts are computed in turns.
  One computes while the other's rows travel to experts or back (``_Run._between_exchanges``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from distca.recurrent import CoreParameters, Recurrence, RecurrentKernel
from distca.runtime.attention_call import AttentionCall
from distca.runtime.device_routes import LayerRoutes, NanoRoutes
from distca.runtime.recurrent_call import RecurrentCall
from distca.runtime.recurrent_routes import RecurrentRoutes
from distca.runtime.server import AttentionPool


class SplitLayer(Protocol):
    """A transformer layer cut at its core attention.

    ``nano`` is 0 for ping, 1 for pong. Shape suffixes: N rows of this rank, H query heads, 2 (k and v), G key/value
    heads, D head dimension. ``hidden`` may have any shape."""

    @property
    def sink(self) -> torch.Tensor | None:
        """[H] sinks: for each head a learned score in the softmax that belongs to no key; None without sinks."""
        ...

    def pre(self, hidden: torch.Tensor, nano: int) -> tuple[torch.Tensor, ...]:
        """Returns any number of tensors for the ``residual`` of :meth:`post`, then q_NHD and kv_N2GD.

        If values are not as wide as keys, kv is [N, G, key width + value width], and o has the width of values."""
        ...

    def post(self, o_NHD: torch.Tensor, *residual: torch.Tensor, nano: int) -> torch.Tensor: ...


class ExchangingLayer(SplitLayer, Protocol):
    """A split layer whose ``post`` may send rows to experts on other ranks."""

    @property
    def has_exchanges(self) -> bool: ...

    def post_parts(
        self, o_NHD: torch.Tensor, *residual: torch.Tensor, nano: int
    ) -> Generator[None, None, torch.Tensor]:
        """Computes :meth:`post` as a generator, which pauses while rows travel to experts or back."""
        ...


class RecurrentLayer(Protocol):
    """A layer cut at its recurrent core: a short convolution and a recurrence.

    Shape suffixes: N rows of this rank, C channels of the convolution, H heads, K elements of a key, V elements of a
    value."""

    @property
    def recurrence(self) -> Recurrence: ...

    @property
    def core_kernel(self) -> RecurrentKernel: ...

    @property
    def core_parameters(self) -> CoreParameters: ...

    def pre(self, hidden: torch.Tensor, nano: int) -> tuple[torch.Tensor, ...]:
        """Returns any number of tensors for the ``residual`` of :meth:`post`, then the core's inputs: mixed_NC, g_NH
        and beta_NH. mixed_NC goes into the convolution. Row n multiplies head h's state by exp(g_NH[n, h]). What the
        row adds to this state is multiplied by beta_NH[n, h]."""
        ...

    def post(self, o_NHV: torch.Tensor, *residual: torch.Tensor, nano: int) -> torch.Tensor: ...


AnyLayer = SplitLayer | ExchangingLayer | RecurrentLayer
AnyCall = AttentionCall | RecurrentCall
Checkpoint = Callable[..., Any]


def run_layers(
    layers: Sequence[AnyLayer],
    hidden: Sequence[torch.Tensor],
    routes: Sequence[LayerRoutes],
    pool: AttentionPool,
    checkpoint: Checkpoint | None = None,
) -> list[torch.Tensor]:
    """Runs ``layers`` on every nano-batch; returns the output of each.

    Args:
        hidden: for each nano-batch, the first layer's input. With one tensor there is only ping.
        routes: for each layer and nano-batch, the rows that this rank sends, receives and computes.
        pool: this rank's transport and attention kernel.
        checkpoint: ``checkpoint(function, *tensors)`` must return ``function(*tensors)``, and recompute it in backward;
            None if nothing is recomputed. A ``function`` is at most a layer's post and the next layer's pre.
    """
    run = _Run(layers, routes, pool, checkpoint)
    graph_tokens = run.first(hidden)
    for layer in range(len(layers)):
        run.attend(layer, graph_tokens)
        run.between(layer, graph_tokens)
    return run.outputs


class _Run:
    def __init__(
        self,
        layers: Sequence[AnyLayer],
        routes: Sequence[LayerRoutes],
        pool: AttentionPool,
        checkpoint: Checkpoint | None,
    ) -> None:
        assert len(routes) == len(layers)
        self._layers, self._routes, self._pool = layers, routes, pool
        self._recomputes = checkpoint is not None
        self._checkpoint = checkpoint or (lambda function, *tensors: function(*tensors))
        self._calls: list[AnyCall] = []
        self._residuals: list[tuple[torch.Tensor, ...]] = []  # for each nano-batch, the tensors from pre to post
        self._previous_kv: torch.Tensor | None = None  # k and v of the newest attention call
        self.outputs: list[torch.Tensor] = []

    def first(self, hidden: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the first layer's pre, and launches each nano-batch's first transfer.

        Returns each nano-batch's *graph token*: a dummy scalar that gives autograd an edge to the next node."""
        graph_tokens = []
        for nano, each in enumerate(hidden):
            with self._pool.timeline.compute("pre", 0, nano, "forward"):
                made = self._checkpoint(partial(self._layers[0].pre, nano=nano), each)
            graph_tokens.append(self._launch(0, nano, made))
        return graph_tokens

    def attend(self, layer: int, graph_tokens: list[torch.Tensor]) -> None:
        for nano, call in enumerate(self._calls):
            graph_tokens[nano] = _through_core(call, self._layers[layer], graph_tokens[nano])

    def between(self, layer: int, graph_tokens: list[torch.Tensor]) -> None:
        last = layer + 1 == len(self._layers)
        calls, self._calls = self._calls, []
        residuals, self._residuals = self._residuals, []
        split: Any = self._layers[layer]
        if not self._recomputes and getattr(split, "has_exchanges", False):
            self._between_exchanges(layer, calls, residuals, graph_tokens)
            return
        for nano, call in enumerate(calls):
            o = _out_of_core(call, self._layers[layer], graph_tokens[nano])
            with self._pool.timeline.compute("post" if last else "post+pre", layer, nano, "forward"):
                # Functions for self._checkpoint must not refer to self. Autograd's graph holds them, and
                # self._previous_kv holds the graph. Python's garbage collector would not find this cycle.
                if last:
                    post = partial(self._layers[layer].post, nano=nano)
                    self.outputs.append(self._checkpoint(post, o, *residuals[nano]))
                    continue
                post_pre = partial(_post_pre, self._layers[layer], self._layers[layer + 1], nano)
                made = self._checkpoint(post_pre, o, *residuals[nano])
            residuals[nano] = ()
            graph_tokens[nano] = self._launch(layer + 1, nano, made)

    def _between_exchanges(
        self,
        layer: int,
        calls: Sequence[AnyCall],
        residuals: list[tuple[torch.Tensor, ...]],
        graph_tokens: list[torch.Tensor],
    ) -> None:
        """Runs the nano-batches' posts in turns, as generators that pause while rows travel to experts or back.

        All generators must pause equally often: the loop ends once the last nano-batch's generator has ended."""
        split: Any = self._layers[layer]
        posts, last, paused = [], layer + 1 == len(self._layers), True
        for nano, call in enumerate(calls):
            o = _out_of_core(call, split, graph_tokens[nano])
            posts.append(split.post_parts(o, *residuals[nano], nano=nano))
            residuals[nano] = ()
            with self._pool.timeline.compute("post", layer, nano, "forward"):
                next(posts[nano])
        while paused:
            for nano, post in enumerate(posts):
                with self._pool.timeline.compute("experts", layer, nano, "forward"):
                    hidden = _gone_on(post)
                    paused = hidden is None
                    made = None if hidden is None or last else self._layers[layer + 1].pre(hidden, nano)
                if made is not None:
                    graph_tokens[nano] = self._launch(layer + 1, nano, made)
                elif hidden is not None:
                    self.outputs.append(hidden)

    def _launch(self, layer: int, nano: int, made: tuple[torch.Tensor, ...]) -> torch.Tensor:
        routes, before = self._routes[layer][nano], self._calls[-1] if self._calls else None
        if isinstance(routes, RecurrentRoutes):
            *residual, mixed, g, beta = made
            self._residuals.append(tuple(residual))
            return self._recurrent_call(layer, nano, routes, before).launch_halo(mixed, g, beta)
        *residual, q, kv = made
        sink = self._layers[layer].sink  # type: ignore[union-attr]
        if sink is not None and sink.requires_grad and torch.is_grad_enabled() and not q.requires_grad:
            # The sinks' gradient needs the backward of all nodes of the call. Autograd runs this backward only if an
            # input of the call requires a gradient.
            q = q.detach().requires_grad_()
        self._residuals.append(tuple(residual))
        prefix = self._prefix(routes)
        self._previous_kv = kv
        assert not isinstance(before, RecurrentCall)
        call = AttentionCall(self._pool, routes, layer, nano, before)
        self._calls.append(call)
        return call.launch_qkv(q, kv, prefix)

    def _recurrent_call(self, layer: int, nano: int, routes: RecurrentRoutes, before: AnyCall | None) -> RecurrentCall:
        core: Any = self._layers[layer]
        assert not isinstance(before, AttentionCall)
        call = RecurrentCall(self._pool, routes, core.recurrence, core.core_kernel, layer, nano, before)
        self._calls.append(call)
        return call

    def _prefix(self, routes: NanoRoutes) -> torch.Tensor | None:
        """Returns the keys and values of the rows ``routes.prefix`` of ping; None without such rows."""
        if not routes.prefix:
            return None
        assert self._previous_kv is not None
        ranges = [self._previous_kv[begin:end] for begin, end in routes.prefix]
        return ranges[0] if len(ranges) == 1 else torch.cat(ranges)


def _through_core(call: AnyCall, layer: Any, token: torch.Tensor) -> torch.Tensor:
    if isinstance(call, RecurrentCall):
        return call.launch_states(call.summarise(call.join_halo(token), layer.core_parameters))
    return call.launch_o(call.serve(call.join_qkv(token)), layer.sink)


def _out_of_core(call: AnyCall, layer: Any, token: torch.Tensor) -> torch.Tensor:
    return call.join_states(token) if isinstance(call, RecurrentCall) else call.join_o(token, layer.sink)


def _gone_on(post: Generator[None, None, torch.Tensor]) -> torch.Tensor | None:
    """Runs a generator to its next pause or to its end; returns None or the generator's output."""
    try:
        next(post)
    except StopIteration as end:
        hidden: torch.Tensor = end.value
        return hidden
    return None


def _post_pre(
    layer: AnyLayer, following: AnyLayer, nano: int, o: torch.Tensor, *residual: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return following.pre(layer.post(o, *residual, nano=nano), nano)
