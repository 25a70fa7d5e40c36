"""Attention for other pipeline stages, while this rank's stage has no micro-batch.

- phase: all stages run forward at the same time, or all run backward. A stage has one micro-batch or none.
- nano-batch: one of the two parts of a micro-batch, ping (first) and pong (second).

Ranks of all stages exchange attention rows in a phase, and each exchange needs all ranks. So a rank without a
micro-batch runs stand-ins for its layers, with tensors of 0 rows.

Shape suffixes: N rows, always 0 here; H heads, D elements of a head, V elements of a head of v.
"""

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
    """A stand-in for a transformer layer, with 0 rows.

    Attributes:
        heads: query heads of this tensor-parallel rank.
        kv_heads: key/value heads of this tensor-parallel rank.
        head_dim: elements of a query head and of a key head.
        dtype: dtype of the rows.
        device: the rank's device.
        value_dim: elements of a value head; 0 stands for ``head_dim``.
    """

    sink = None

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    value_dim: int = 0

    def pre(self, hidden: torch.Tensor, nano: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        k, v = self._no_rows(self.kv_heads, self.head_dim), self._no_rows(self.kv_heads, self.value_width)
        return hidden, self._no_rows(self.heads, self.head_dim), together(k, v)

    def post(self, o_NHD: torch.Tensor, *residual: torch.Tensor, nano: int) -> torch.Tensor:
        (hidden,) = residual
        return hidden

    @property
    def output(self) -> torch.Tensor:
        """o_NHD of no rows."""
        return self._no_rows(self.heads, self.value_width)

    @property
    def value_width(self) -> int:
        """Elements of a value head."""
        return self.value_dim or self.head_dim

    def _no_rows(self, heads: int, width: int) -> torch.Tensor:
        return torch.empty(0, heads, width, dtype=self.dtype, device=self.device)

    def call_for_backward(
        self, pool: AttentionPool, routes: Any, layer: int, nano: int, before: Any = None
    ) -> AttentionCall:
        """Returns a call for this layer's backward of one nano-batch; ``before`` is not used."""
        _, q, kv = self.pre(torch.empty(0), nano)
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        return AttentionCall.for_backward(pool, routes, layer, nano, HomeRows(q, kv, None, self.output, lse))


@dataclass(frozen=True)
class EmptyRecurrentLayer:
    """A stand-in for a layer with a recurrent core (linear attention, SSM), with 0 rows.

    Attributes:
        recurrence: the formula and shapes of the core.
        core_kernel: the kernel that computes the core.
        core_parameters: the core's weights, without gradients.
        dtype: dtype of the rows.
        device: the rank's device.
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
        """Returns a call for this layer's backward of one nano-batch.

        In pong, ``before`` is the layer's call for ping; in ping it is None."""
        call = RecurrentCall(pool, routes, self.recurrence, self.core_kernel, layer, nano, before)
        call.begin_backward(self._rows, self.core_parameters)
        return call

    @property
    def _rows(self) -> tuple[torch.Tensor, ...]:
        what, dtype = self.recurrence, torch.promote_types(self.dtype, torch.float32)
        return (
            torch.empty(0, what.channels, dtype=self.dtype, device=self.device),
            torch.empty(0, *what.decay_shape, dtype=dtype, device=self.device),
            torch.empty(0, what.heads, dtype=self.dtype, device=self.device),
        )


AnyEmptyLayer = EmptyLayer | EmptyRecurrentLayer


def serve_forward(pool: AttentionPool, routes: Sequence[LayerRoutes], layers: Sequence[AnyEmptyLayer]) -> None:
    """Computes attention in a forward phase in which this rank has no micro-batch.

    Args:
        pool: this rank's transport, attention kernel and timeline.
        routes: for each layer, the rows that this rank receives and computes.
        layers: stand-ins for this rank's layers.
    """
    with torch.no_grad():
        run_layers(layers, [torch.empty(0)] * len(routes[0]), routes, pool)


def serve_backward(pool: AttentionPool, routes: Sequence[LayerRoutes], layers: Sequence[AnyEmptyLayer]) -> None:
    """Computes attention in a backward phase in which this rank has no micro-batch.

    Exchanges have autograd's order: from the last layer to the first, and in each layer pong before ping.

    Args:
        pool: this rank's transport, attention kernel and timeline.
        routes: for each layer, the rows that this rank receives and computes.
        layers: stand-ins for this rank's layers.
    """
    above: list[AttentionCall | RecurrentCall] = []
    for number, (layer, of_layer) in reversed(list(enumerate(zip(layers, routes, strict=True)))):
        calls: list[AttentionCall | RecurrentCall] = []
        for nano, each in enumerate(of_layer):
            calls.append(layer.call_for_backward(pool, each, number, nano, calls[-1] if calls else None))
        calls.reverse()
        # All ranks must launch and join exchanges in the same order. On other ranks, autograd joins the gradients of
        # the layer above right before it launches dO of this layer.
        for place, call in enumerate(calls):
            if above:
                above[place].backward_join_gradients()
            call.backward_launch_do(layer.output)
        for call in calls:
            call.backward_serve()
        above = calls
    for call in above:
        call.backward_join_gradients()
