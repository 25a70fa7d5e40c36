"""A rank without tokens that serves a phase of others: the same exchanges in the same order, and no work of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distca.recurrent import CoreParameters, Recurrence, RecurrentKernel
from distca.runtime.attention_call import AttentionCall
from distca.runtime.device_routes import LayerRoutes
from distca.runtime.kept_rows import HomeRows
from distca.runtime.ping_pong import run_layers
from distca.runtime.recurrent_call import RecurrentCall
from distca.runtime.server import AttentionPool, together


@dataclass(frozen=True)
class EmptyLayer:
    """Stands in for a transformer layer where there are no tokens.

    Attributes:
        heads: query heads of this tensor-parallel rank.
        kv_heads: key/value heads of this tensor-parallel rank.
        head_dim: elements per head of queries and keys.
        dtype: dtype of the rows.
        device: where the server computes.
        value_dim: elements per head of values, where these are narrower; 0 for ``head_dim``.
    """

    sink = None

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    value_dim: int = 0

    def pre(self, hidden: torch.Tensor, nano: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        k, v = self._no_rows(self.kv_heads, self.head_dim), self._no_rows(self.kv_heads, self._width)
        return hidden, self._no_rows(self.heads, self.head_dim), together(k, v)

    def post(self, o_NHD: torch.Tensor, *residual: torch.Tensor, nano: int) -> torch.Tensor:
        (hidden,) = residual
        return hidden

    @property
    def output(self) -> torch.Tensor:
        """o_NHD of no rows."""
        return self._no_rows(self.heads, self._width)

    @property
    def _width(self) -> int:
        return self.value_dim or self.head_dim

    def _no_rows(self, heads: int, width: int) -> torch.Tensor:
        return torch.empty(0, heads, width, dtype=self.dtype, device=self.device)

    def call_for_backward(
        self, pool: AttentionPool, routes: Any, layer: int, nano: int, before: Any = None
    ) -> AttentionCall:
        """The layer's call for one nano-batch, which begins with its backward."""
        _, q, kv = self.pre(torch.empty(0), nano)
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        return AttentionCall.for_backward(pool, routes, layer, nano, HomeRows(q, kv, None, self.output, lse))


@dataclass(frozen=True)
class EmptyRecurrentLayer:
    """Stands in for a layer with a recurrent core where there are no tokens.

    Attributes:
        recurrence: the formula that the core computes.
        core_kernel: the kernel that computes it.
        core_parameters: the core's weights, without gradients.
        dtype: dtype of the rows.
        device: where the rank computes.
    """

    recurrence: Recurrence
    core_kernel: RecurrentKernel
    core_parameters: CoreParameters
    dtype: torch.dtype
    device: torch.device

    def pre(self, hidden: torch.Tensor, nano: int) -> tuple[torch.Tensor, ...]:
        return hidden, *self._rows

    def post(self, o_NHV: torch.Tensor, *residual: torch.Tensor, nano: int) -> torch.Tensor:
        (hidden,) = residual
        return hidden

    @property
    def output(self) -> torch.Tensor:
        """o_NHV of no rows."""
        return torch.empty(0, self.recurrence.heads, self.recurrence.value_dim, dtype=self.dtype, device=self.device)

    def call_for_backward(
        self, pool: AttentionPool, routes: Any, layer: int, nano: int, before: Any = None
    ) -> RecurrentCall:
        """The layer's call for one nano-batch, which begins with its backward; ``before`` is that of the nano-batch
        before."""
        call = RecurrentCall(pool, routes, self.recurrence, self.core_kernel, layer, nano, before)
        call.begin_backward(self._rows, self.core_parameters)
        return call

    @property
    def _rows(self) -> tuple[torch.Tensor, ...]:
        """mixed_NC, g and beta_NH of no rows."""
        what, dtype = self.recurrence, torch.promote_types(self.dtype, torch.float32)
        return (
            torch.empty(0, what.channels, dtype=self.dtype, device=self.device),
            torch.empty(0, *what.decay_shape, dtype=dtype, device=self.device),
            torch.empty(0, what.heads, dtype=self.dtype, device=self.device),
        )


AnyEmptyLayer = EmptyLayer | EmptyRecurrentLayer


def serve_forward(pool: AttentionPool, routes: Sequence[LayerRoutes], layers: Sequence[AnyEmptyLayer]) -> None:
    """Serves a forward phase in which this rank has no micro-batch.

    Args:
        pool: the server pool.
        routes: this rank's routes of every layer.
        layers: layers that stand in for this rank's own.
    """
    with torch.no_grad():
        run_layers(layers, [torch.empty(0)] * len(routes[0]), routes, pool)


def serve_backward(pool: AttentionPool, routes: Sequence[LayerRoutes], layers: Sequence[AnyEmptyLayer]) -> None:
    """Serves a backward phase in which this rank has no micro-batch; arguments as in :func:`serve_forward`.

    Exchanges have the order in which autograd runs them on ranks with tokens."""
    above: list[AttentionCall | RecurrentCall] = []
    for number, (layer, of_layer) in reversed(list(enumerate(zip(layers, routes, strict=True)))):
        calls: list[AttentionCall | RecurrentCall] = []
        for nano, each in enumerate(of_layer):
            calls.append(layer.call_for_backward(pool, each, number, nano, calls[-1] if calls else None))
        calls.reverse()
        # As on ranks with tokens, a nano-batch's gradients of the layer above are joined right before its dO is
        # launched. So every rank has the same exchanges under way whenever one is launched.
        for place, call in enumerate(calls):
            if above:
                above[place].backward_join_gradients()
            call.backward_launch_do(layer.output)
        for call in calls:
            call.backward_serve()
        above = calls
    for call in above:
        call.backward_join_gradients()
