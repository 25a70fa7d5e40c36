"""The base class of ``AttentionCall`` and ``RecurrentCall``, which run a layer's core as a chain of autograd nodes.

The *core* of a layer is its attention or recurrence. One node launches a transfer of rows. A later node *joins* the
transfer: the node waits for the transfer's end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distca.runtime.server import AttentionPool
from distca.transport import Handle, Part, Transport
from distca.transport.interface import sent_by


class LayerCall:
    """The core of one layer for a micro-batch or its first part (``nano`` 0), or for its second part (``nano`` 1).

    At most one transfer of a call may be under way at a time.
    """

    def __init__(self, pool: AttentionPool, layer: int, nano: int, transport: Transport) -> None:
        self._pool, self._transport = pool, transport
        self._where = (layer, nano)
        self._handle: Handle | None = None

    def _launch(self, what: str, direction: str, *parts: Part) -> None:
        self._handle = self._transport.launch(parts)
        timeline = self._pool.timeline
        args = sent_by(self._transport.rank, parts) if timeline.recording else None
        timeline.launched(what, self._handle, *self._where, direction, args)

    def _join(self, what: str, direction: str) -> None:
        assert self._handle is not None
        self._pool.timeline.joined(what, *self._where, direction)
        with self._pool.timeline.waiting(what):
            self._handle.wait()
        self._handle = None


def graph_token(device: torch.device) -> torch.Tensor:
    """Returns a dummy scalar, which gives autograd an edge from one node to the next.

    ``device`` must be the rows' device: autograd has a thread for each device, and runs nodes in reverse order of
    creation only within a thread."""
    return torch.empty((), device=device)


class Node(torch.autograd.Function):
    """An autograd node. ``apply(graph_token, forward, backward)`` calls ``forward``; the backward pass calls
    ``backward``."""

    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, forward: Callable[[], None], backward: Callable[[], None]
    ) -> torch.Tensor:
        ctx.backward_part = backward
        forward()
        return graph_token(token.device)

    @staticmethod
    def backward(ctx: Any, *tokens: torch.Tensor) -> Any:
        ctx.backward_part()
        return graph_token(tokens[0].device), None, None
