"""The order in which a stack of layers runs one or two nano-batches, so that every transfer hides behind compute.

For layer i and halves 0 (ping) and 1 (pong), nodes are created in this order:

    join q,k,v(i,0) · serve(i,0) · launch o(i,0) · join q,k,v(i,1) · serve(i,1) · launch o(i,1)
    join o(i,0) · post(i,0)+pre(i+1,0) · launch q,k,v(i+1,0) · join o(i,1) · post(i,1)+pre(i+1,1) · launch q,k,v(i+1,1)

The autograd engine runs ready nodes in reverse order of creation, so backward is the mirror image, with each reverse
transfer launched before the other half's compute and joined after it. No rank waits for another except for the rows
themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from distca.runtime.attention_call import AttentionCall
from distca.runtime.device_routes import LayerRoutes
from distca.runtime.server import AttentionPool


class SplitLayer(Protocol):
    """A transformer layer cut at its core attention. ``nano`` is 0 or 1; hidden tensors are opaque here."""

    @property
    def sink(self) -> torch.Tensor | None:
        """[heads] learned scores without values of this rank's heads; None for a layer without sinks."""
        ...

    def pre(self, hidden: torch.Tensor, nano: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Everything before core attention: the residual that :meth:`post` is to be given, q_NHD and kv_N2GD."""
        ...

    def post(self, o_NHD: torch.Tensor, hidden: torch.Tensor, nano: int) -> torch.Tensor:
        """Everything after it; ``hidden`` is the residual that pre returned."""
        ...


Checkpoint = Callable[..., Any]


def run_layers(
    layers: Sequence[SplitLayer],
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
    state = list(hidden)
    graph_tokens = run.first(state)
    for layer in range(len(layers)):
        run.attend(layer, graph_tokens)
        run.between(layer, state, graph_tokens)
    return state


class _Run:
    def __init__(
        self,
        layers: Sequence[SplitLayer],
        routes: Sequence[LayerRoutes],
        pool: AttentionPool,
        checkpoint: Checkpoint | None,
    ) -> None:
        assert len(routes) == len(layers)
        self._layers, self._routes, self._pool = layers, routes, pool
        self._checkpoint = checkpoint or (lambda function, *tensors: function(*tensors))
        self._calls: list[AttentionCall] = []
        self._previous_kv: torch.Tensor | None = None

    def first(self, state: list[torch.Tensor]) -> list[torch.Tensor]:
        graph_tokens = []
        for nano, hidden in enumerate(state):
            with self._pool.timeline.compute("pre", 0, nano, "forward"):
                state[nano], q, kv = self._checkpoint(partial(self._layers[0].pre, nano=nano), hidden)
            graph_tokens.append(self._launch(0, nano, q, kv))
        return graph_tokens

    def attend(self, layer: int, graph_tokens: list[torch.Tensor]) -> None:
        for nano, call in enumerate(self._calls):
            served = call.serve(call.join_qkv(graph_tokens[nano]))
            graph_tokens[nano] = call.launch_o(served, self._layers[layer].sink)

    def between(self, layer: int, state: list[torch.Tensor], graph_tokens: list[torch.Tensor]) -> None:
        last = layer + 1 == len(self._layers)
        calls, self._calls = self._calls, []
        for nano, call in enumerate(calls):
            o = call.join_o(graph_tokens[nano], self._layers[layer].sink)
            with self._pool.timeline.compute("post" if last else "post+pre", layer, nano, "forward"):
                # What is recomputed must not hold this object: k,v of the last launch lead back to it by the graph,
                # in a circle that Python's garbage collector cannot see.
                if last:
                    post = partial(self._layers[layer].post, nano=nano)
                    state[nano] = self._checkpoint(post, o, state[nano])
                    continue
                post_pre = partial(_post_pre, self._layers[layer], self._layers[layer + 1], nano)
                state[nano], q, kv = self._checkpoint(post_pre, o, state[nano])
            graph_tokens[nano] = self._launch(layer + 1, nano, q, kv)

    def _launch(self, layer: int, nano: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        routes = self._routes[layer][nano]
        prefix = None
        if routes.prefix:
            # The second half continues a document whose head is in the first: its keys and values are needed again.
            assert self._previous_kv is not None
            ranges = [self._previous_kv[begin:end] for begin, end in routes.prefix]
            prefix = ranges[0] if len(ranges) == 1 else torch.cat(ranges)
        self._previous_kv = kv
        before = self._calls[-1] if self._calls else None
        call = AttentionCall(self._pool, routes, layer, nano, before)
        self._calls.append(call)
        return call.launch_qkv(q, kv, prefix)


def _post_pre(
    layer: SplitLayer, following: SplitLayer, nano: int, o_NHD: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return following.pre(layer.post(o_NHD, hidden, nano), nano)
