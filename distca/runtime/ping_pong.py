"""The order in which a stack of layers runs one or two nano-batches, so that every transfer hides behind compute.

For layer i and nano-batches 0 (ping) and 1 (pong), nodes are created in this order:

    join q,k,v(i,0) · serve(i,0) · launch o(i,0) · join q,k,v(i,1) · serve(i,1) · launch o(i,1)
    join o(i,0) · post(i,0)+pre(i+1,0) · launch q,k,v(i+1,0) · join o(i,1) · post(i,1)+pre(i+1,1) · launch q,k,v(i+1,1)

The autograd engine runs ready nodes in reverse order of creation, so backward is the mirror image. Each reverse
transfer is launched before the other nano-batch's compute and joined after it. Ranks wait for each other's rows, and
for nothing else.

Where ``post`` sends rows to experts, it has three parts, and each runs for both nano-batches before the next one:

- everything up to the experts, with the launch of their rows(i,n);
- experts(i,n), with the launch of their outputs;
- the sum of outputs, with pre(i+1,n).

A recurrent layer sends the halo of its convolution in place of q,k,v, and states in place of o. In place of tasks it
computes summaries of pieces.
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
    """A transformer layer cut at its core attention. ``nano`` is 0 or 1; hidden tensors are opaque here."""

    @property
    def sink(self) -> torch.Tensor | None:
        """[heads] learned scores without values of this rank's heads; None for a layer without sinks."""
        ...

    def pre(self, hidden: torch.Tensor, nano: int) -> tuple[torch.Tensor, ...]:
        """Computes everything before core attention; returns one or more tensors for :meth:`post`, then q_NHD and
        kv_N2GD."""
        ...

    def post(self, o_NHD: torch.Tensor, *residual: torch.Tensor, nano: int) -> torch.Tensor:
        """Computes everything after core attention; ``residual`` are the tensors that pre returned for it."""
        ...


class ExchangingLayer(SplitLayer, Protocol):
    """A split layer whose ``post`` sends rows to experts on other ranks."""

    @property
    def has_exchanges(self) -> bool:
        """Whether this layer has experts."""
        ...

    def post_parts(
        self, o_NHD: torch.Tensor, *residual: torch.Tensor, nano: int
    ) -> Generator[None, None, torch.Tensor]:
        """Computes what post does, as a generator: it pauses while rows are on their way to experts, and back."""
        ...


class RecurrentLayer(Protocol):
    """A layer cut at its recurrent core."""

    @property
    def recurrence(self) -> Recurrence:
        """The formula that the core computes."""
        ...

    @property
    def core_kernel(self) -> RecurrentKernel:
        """The kernel that computes the core."""
        ...

    @property
    def core_parameters(self) -> CoreParameters:
        """The core's weights of this rank's heads."""
        ...

    def pre(self, hidden: torch.Tensor, nano: int) -> tuple[torch.Tensor, ...]:
        """Computes everything before the core; returns one or more tensors for :meth:`post`, then mixed_NC, g and
        beta_NH as in :class:`RecurrentCall`."""
        ...

    def post(self, o_NHV: torch.Tensor, *residual: torch.Tensor, nano: int) -> torch.Tensor:
        """Computes everything after the core; ``residual`` are the tensors that pre returned for it."""
        ...


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
    """Runs ``layers`` on every nano-batch.

    Args:
        layers: the split layers.
        hidden: input of each nano-batch.
        routes: this rank's routes of every layer.
        pool: the server pool.
        checkpoint: ``checkpoint(function, *tensors)`` recomputes ``function`` in backward. It is applied to
            post(i)+pre(i+1), never to core attention, so that nothing is sent twice.

    Returns:
        The output of each nano-batch.
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
        self._residuals: list[tuple[torch.Tensor, ...]] = []  # by nano-batch, for the next post
        self._previous_kv: torch.Tensor | None = None
        self.outputs: list[torch.Tensor] = []

    def first(self, hidden: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs pre of the first layer and launches its core; returns a graph token for each nano-batch."""
        graph_tokens = []
        for nano, each in enumerate(hidden):
            with self._pool.timeline.compute("pre", 0, nano, "forward"):
                made = self._checkpoint(partial(self._layers[0].pre, nano=nano), each)
            graph_tokens.append(self._launch(0, nano, made))
        return graph_tokens

    def attend(self, layer: int, graph_tokens: list[torch.Tensor]) -> None:
        """Runs the core of a layer."""
        for nano, call in enumerate(self._calls):
            graph_tokens[nano] = _through_core(call, self._layers[layer], graph_tokens[nano])

    def between(self, layer: int, graph_tokens: list[torch.Tensor]) -> None:
        """Runs post of a layer and pre of the next one, and launches that one's core."""
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
                # A recomputed function must not hold this object. The graph leads from k,v of the last launch back to
                # it, which makes a circle that Python's garbage collector cannot see.
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
        """Runs :meth:`between` where post sends rows to experts: those of one nano-batch travel beside the other's
        compute."""
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
        """Launches the core of a layer with the tensors that its pre returned; returns the graph token."""
        routes, before = self._routes[layer][nano], self._calls[-1] if self._calls else None
        if isinstance(routes, RecurrentRoutes):
            *residual, mixed, g, beta = made
            self._residuals.append(tuple(residual))
            return self._recurrent_call(layer, nano, routes, before).launch_halo(mixed, g, beta)
        *residual, q, kv = made
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
        """The keys and values of ping that pong needs again, since it continues documents of ping; None for none."""
        if not routes.prefix:
            return None
        assert self._previous_kv is not None
        ranges = [self._previous_kv[begin:end] for begin, end in routes.prefix]
        return ranges[0] if len(ranges) == 1 else torch.cat(ranges)


def _through_core(call: AnyCall, layer: Any, token: torch.Tensor) -> torch.Tensor:
    """Joins the rows that the core needs, computes it and launches its results; returns the graph token."""
    if isinstance(call, RecurrentCall):
        return call.launch_states(call.summarise(call.join_halo(token), layer.core_parameters))
    return call.launch_o(call.serve(call.join_qkv(token)), layer.sink)


def _out_of_core(call: AnyCall, layer: Any, token: torch.Tensor) -> torch.Tensor:
    """Joins the core's results; returns o of this rank's rows."""
    return call.join_states(token) if isinstance(call, RecurrentCall) else call.join_o(token, layer.sink)


def _gone_on(post: Generator[None, None, torch.Tensor]) -> torch.Tensor | None:
    """Runs the next part of a post; returns its output after the last part, else None."""
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
