"""A rank without tokens that serves a phase of others: the same exchanges in the same order, and no work of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distca.runtime.attention_call import AttentionCall
from distca.runtime.device_routes import LayerRoutes, NanoRoutes
from distca.runtime.kept_rows import HomeRows
from distca.runtime.ping_pong import run_layers
from distca.runtime.recurrent_routes import RecurrentRoutes
from distca.runtime.server import AttentionPool


@dataclass(frozen=True)
class EmptyLayer:
    """Stands in for a transformer layer where there are no tokens.

    Attributes:
        heads: query heads of this tensor-parallel rank.
        kv_heads: key/value heads of this tensor-parallel rank.
        head_dim: elements per head.
        dtype: of the rows.
        device: where the server computes.
    """

    sink = None

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def pre(self, hidden: torch.Tensor, nano: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            hidden,
            torch.empty(0, self.heads, self.head_dim, dtype=self.dtype, device=self.device),
            torch.empty(0, 2, self.kv_heads, self.head_dim, dtype=self.dtype, device=self.device),
        )

    def post(self, o_NHD: torch.Tensor, *residual: torch.Tensor, nano: int) -> torch.Tensor:
        (hidden,) = residual
        return hidden


def serve_forward(pool: AttentionPool, routes: Sequence[LayerRoutes], layer: EmptyLayer) -> None:
    """Serve a forward phase of others.

    Args:
        pool: the server pool.
        routes: of every layer.
        layer: stands in for this rank's own.
    """
    with torch.no_grad():
        run_layers([layer] * len(routes), [torch.empty(0)] * len(routes[0]), routes, pool)


def serve_backward(pool: AttentionPool, routes: Sequence[LayerRoutes], layer: EmptyLayer) -> None:
    """Serve a backward phase of others, in the order in which autograd runs it on ranks with tokens; arguments as of
    :func:`serve_forward`."""
    _, q, kv = layer.pre(torch.empty(0), 0)
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    above: list[AttentionCall] = []
    for number, halves in reversed(list(enumerate(routes))):
        calls = [
            AttentionCall.for_backward(pool, _of_attention(each), number, nano, HomeRows(q, kv, None, q, lse))
            for nano, each in enumerate(halves)
        ][::-1]
        # As on ranks with tokens, a half's gradients of the layer above are joined right before its dO is launched:
        # every rank then has the same exchanges under way whenever one is launched.
        for place, call in enumerate(calls):
            if above:
                above[place].backward_join_gradients()
            call.backward_launch_do(q)
        for call in calls:
            call.backward_serve()
        above = calls
    for call in above:
        call.backward_join_gradients()


def _of_attention(routes: NanoRoutes | RecurrentRoutes) -> NanoRoutes:
    assert isinstance(routes, NanoRoutes), "recurrent layers are not served with pipeline stages"
    return routes
