"""The order in which a stack of layers runs one or two nano-batches, so that every transfer hides behind compute.

For layer i and halves 0 (ping) and 1 (pong), nodes are created in this order:

    join q,k,v(i,0) · serve(i,0) · launch o(i,0) · join q,k,v(i,1) · serve(i,1) · launch o(i,1)
    join o(i,0) · post(i,0)+pre(i+1,0) · launch q,k,v(i+1,0) · join o(i,1) · post(i,1)+pre(i+1,1) · launch q,k,v(i+1,1)

Where ``post`` sends rows to experts, it is in three parts, each for both halves before the next: what is before them
with the launch of rows(i,n); experts(i,n) with the launch of what they put out; and its sum with pre(i+1,n).

A recurrent layer has the halo of its convolution in place of q,k,v. It has summaries of pieces in place of tasks, and
states in place of o. The autograd engine runs ready nodes in reverse order of creation, so backward is the mirror
image. Each reverse transfer is launched before the other half's compute and joined after it. No rank waits for another
except for the rows themselves.
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
        """Everything before core attention: what :meth:`post` is to be given, one tensor or more, then q_NHD and
        kv_N2GD."""
        ...

    def post(self, o_NHD: torch.Tensor, *residual: torch.Tensor, nano: int) -> torch.Tensor:
        """Everything after it; ``residual`` is what pre returned first."""
        ...


class ExchangingLayer(SplitLayer, Protocol):
    """A split layer whose ``post`` sends rows to experts on other ranks."""

    @property
    def has_exchanges(self) -> bool:
        """Whether it has experts."""
        ...

    def post_parts(
        self, o_NHD: torch.Tensor, *residual: torch.Tensor, nano: int
    ) -> Generator[None, None, torch.Tensor]:
        """The output of post; pauses while rows are on their way to experts, and back."""
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
        """Everything before the core: what :meth:`post` is to be given, one tensor or more, then mixed_NC, g and
        beta_NH as of :class:`RecurrentCall`."""
        ...

    def post(self, o_NHV: torch.Tensor, *residual: torch.Tensor, nano: int) -> torch.Tensor:
        """Everything after it; ``residual`` is what pre returned first."""
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
    """Run ``layers`` on every nano-batch.

    Args:
        layers: the split layers.
        hidden: input of each nano-batch.
        routes: this rank's, of every layer.
        pool: the server pool.
        checkpoint: ``checkpoint(function, *tensors)`` that recomputes ``function`` in backward; applied to
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
        self._residuals: list[tuple[torch.Tensor, ...]] = []  # of each half, for the next post
        self._previous_kv: torch.Tensor | None = None
        self.outputs: list[torch.Tensor] = []

    def first(self, hidden: Sequence[torch.Tensor]) -> list[torch.Tensor]:
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
                # What is recomputed must not hold this object: k,v of the last launch lead back to it by the graph,
                # in a circle that Python's garbage collector cannot see.
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
        """The same where ``post`` sends rows to experts: those of one half travel beside the other's compute."""
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
        """Begin the core of a layer with what its ``pre`` returned."""
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
        """Keys and values of the first half that the second needs again, which continues a document of it."""
        if not routes.prefix:
            return None
        assert self._previous_kv is not None
        ranges = [self._previous_kv[begin:end] for begin, end in routes.prefix]
        return ranges[0] if len(ranges) == 1 else torch.cat(ranges)


def _through_core(call: AnyCall, layer: Any, token: torch.Tensor) -> torch.Tensor:
    """Join what the core needs, compute it and launch what comes of it."""
    if isinstance(call, RecurrentCall):
        return call.launch_states(call.summarise(call.join_halo(token), layer.core_parameters))
    return call.launch_o(call.serve(call.join_qkv(token)), layer.sink)


def _out_of_core(call: AnyCall, layer: Any, token: torch.Tensor) -> torch.Tensor:
    """Join it."""
    return call.join_states(token) if isinstance(call, RecurrentCall) else call.join_o(token, layer.sink)


def _gone_on(post: Generator[None, None, torch.Tensor]) -> torch.Tensor | None:
    """The output of the last part; None where one more follows the part that runs."""
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
