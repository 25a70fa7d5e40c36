"""Computes attention for other ranks, while this rank has no micro-batch of its own.

In a *phase* all pipeline stages run forward, or all run backward; a stage has one micro-batch or none. A server without
a model never has one. In each layer, ranks exchange q, k, v and outputs, and every rank must take part in these
exchanges. So a rank without a micro-batch runs stand-ins for layers, whose own q, k and v have 0 rows. In recurrent
layers, ranks compute only their own rows. There a stage without a micro-batch takes part in exchanges, and computes
nothing. A micro-batch is computed in one or two parts, the *nano-batches* ping (first) and pong (second).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distca.plan import PlanOptions
from distca.plan.step import StepPlan
from distca.recurrent import CoreParameters, Recurrence, RecurrentKernel
from distca.runtime.attention_call import AttentionCall
from distca.runtime.device_routes import LayerRoutes, StepRoutes
from distca.runtime.kept_rows import HomeRows
from distca.runtime.ping_pong import run_layers
from distca.runtime.recurrent_call import RecurrentCall
from distca.runtime.server import AttentionPool, together


@dataclass(frozen=True)
class EmptyLayer:
    """A stand-in for a transformer layer, with 0 rows.

    Attributes:
        heads, kv_heads: numbers of query heads and of key/value heads on this tensor-parallel rank.
        value_dim: number of elements of a value head; 0 if it equals ``head_dim``.
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
        return self._no_rows(self.heads, self.value_width)

    @property
    def value_width(self) -> int:
        return self.value_dim or self.head_dim

    def _no_rows(self, heads: int, width: int) -> torch.Tensor:
        return torch.empty(0, heads, width, dtype=self.dtype, device=self.device)

    def call_for_backward(
        self, pool: AttentionPool, routes: Any, layer: int, nano: int, before: Any = None
    ) -> AttentionCall:
        _, q, kv = self.pre(torch.empty(0), nano)
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        return AttentionCall.for_backward(pool, routes, layer, nano, HomeRows(q, kv, None, self.output, lse))


@dataclass(frozen=True)
class EmptyRecurrentLayer:
    """A stand-in for a layer with a recurrent core (linear attention, SSM), with 0 rows.

    Attributes:
        core_parameters: the core's weights, which must not require gradients.
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
        return torch.empty(0, self.recurrence.heads, self.recurrence.value_dim, dtype=self.dtype, device=self.device)

    def call_for_backward(
        self, pool: AttentionPool, routes: Any, layer: int, nano: int, before: Any = None
    ) -> RecurrentCall:
        call = RecurrentCall(pool, routes, self.recurrence, self.core_kernel, layer, nano, before)
        call.begin_backward(self._rows, self.core_parameters)
        return call

    @property
    def _rows(self) -> tuple[torch.Tensor, ...]:
        what, dtype = self.recurrence, torch.promote_types(self.dtype, torch.float32)
        return (
            torch.empty(0, what.channels, dtype=self.dtype, device=self.device),
            torch.empty(0, what.heads, dtype=dtype, device=self.device),
            torch.empty(0, what.heads, dtype=self.dtype, device=self.device),
        )


AnyEmptyLayer = EmptyLayer | EmptyRecurrentLayer


def serve_forward(pool: AttentionPool, routes: Sequence[LayerRoutes], layers: Sequence[AnyEmptyLayer]) -> None:
    """Takes part in a forward phase without a micro-batch; ``routes`` are this rank's transfers in each layer."""
    with torch.no_grad():
        run_layers(layers, [torch.empty(0)] * len(routes[0]), routes, pool)


def serve_backward(pool: AttentionPool, routes: Sequence[LayerRoutes], layers: Sequence[AnyEmptyLayer]) -> None:
    """Takes part in a backward phase without a micro-batch, for which rows are sent again (*resend*).

    Args:
        routes: this rank's transfers in each layer.
    """
    above: list[AttentionCall | RecurrentCall] = []
    for number, (layer, of_layer) in reversed(list(enumerate(zip(layers, routes, strict=True)))):
        calls: list[AttentionCall | RecurrentCall] = []
        for nano, each in enumerate(of_layer):
            calls.append(layer.call_for_backward(pool, each, number, nano, calls[-1] if calls else None))
        calls.reverse()
        # All ranks must launch exchanges in autograd's order: last layer first, and pong before ping. Gradients of
        # layer i + 1 are joined right before layer i's exchange is launched, as autograd does without experts. With
        # experts, autograd joins the gradients of both nano-batches before it launches any exchange of layer i. The
        # order of launches is the same.
        for place, call in enumerate(calls):
            if above:
                above[place].backward_join_gradients()
            call.backward_launch_do(layer.output)
        for call in calls:
            call.backward_serve()
        above = calls
    for call in above:
        call.backward_join_gradients()


def serve_step(pool: AttentionPool, layer: EmptyLayer, plan: StepPlan, routes: StepRoutes, forward_only: bool) -> None:
    """Runs a step on a server without a model, which computes attention for homes.

    With one stage, autograd runs backward, and the server may keep rows for it. With several stages homes send rows
    again, and :func:`serve_backward` runs backward.

    Args:
        layer: stands in for each of the model's layers with attention.
    """
    if plan.options.stages == 1:
        for of_layers in routes.own:
            _serve_micro_batch(pool, layer, plan.options, of_layers, forward_only)
        return
    for direction, number in plan.order():
        of_phase = (routes.served_forward if direction == "forward" else routes.served_backward)[number]
        assert of_phase is not None
        if direction == "forward":
            serve_forward(pool, of_phase, [layer] * len(of_phase))
        elif not forward_only:
            serve_backward(pool, of_phase, [layer] * len(of_phase))


def _serve_micro_batch(
    pool: AttentionPool, layer: EmptyLayer, options: PlanOptions, routes: Sequence[LayerRoutes], forward_only: bool
) -> None:
    kinds = options.layer_kinds[0] if options.layer_kinds else (0,) * len(routes)
    layers = [_TracedLayer(layer, options.kinds[kind].sink) for kind in kinds]
    with torch.set_grad_enabled(not forward_only):
        hidden = [layers[0].hidden() for _ in routes[0]]
        ends = run_layers(layers, hidden, routes, pool)
        if not forward_only:
            torch.cat(ends).sum().backward()


class _TracedLayer:
    """A layer with 0 tokens. Its input requires gradients, so that autograd runs backward through all layers, and
    exchanges come in the same order as on homes.

    Args:
        empty: heads, head widths, dtype and device of the layer's rows.
        has_sink: whether the layer has sinks, which are learned scores in the softmax. The server then sends the
            log-sum-exp of scores too, since homes apply sinks.
    """

    def __init__(self, empty: EmptyLayer, has_sink: bool) -> None:
        self._empty = empty
        self.sink = torch.zeros(empty.heads, device=empty.device) if has_sink else None

    def hidden(self) -> torch.Tensor:
        """Returns the first layer's input: 0 rows, as wide as q, k and v side by side."""
        each = self._empty
        return torch.empty(0, sum(self._widths), dtype=each.dtype, device=each.device, requires_grad=True)

    @property
    def _widths(self) -> tuple[int, int, int]:
        each = self._empty
        return each.heads * each.head_dim, each.kv_heads * each.head_dim, each.kv_heads * each.value_width

    def pre(self, hidden: torch.Tensor, nano: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        each = self._empty
        q, k, v = hidden.split(self._widths, dim=1)
        kv = together(
            k.reshape(0, each.kv_heads, each.head_dim),
            v.reshape(0, each.kv_heads, each.value_width),
        )
        return hidden, q.reshape(0, each.heads, each.head_dim), kv

    def post(self, o_NHD: torch.Tensor, *residual: torch.Tensor, nano: int) -> torch.Tensor:
        # The result must depend on attention's output o, or backward would skip this layer's exchanges.
        (hidden,) = residual
        o = o_NHD.reshape(0, self._empty.heads * self._empty.value_width)
        return torch.cat((o, hidden[:, o.shape[1] :]), dim=1)
