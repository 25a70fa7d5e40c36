"""Activations and gradients on their way between neighbouring pipeline stages, while the next phase computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Neighbours:
    """The stages before and after this one.

    Attributes:
        group: the stages' ranks of one data- and tensor-parallel place, in order.
        dtype: of what travels.
        device: where it lives.
    """

    group: dist.ProcessGroup
    dtype: torch.dtype
    device: torch.device

    def start(self, step: int, sent: torch.Tensor | None, received_shape: tuple[int, ...] | None) -> StageTransfer:
        """Start passing a tensor on to stage + ``step`` and taking one from stage - ``step``.

        Every stage of the group calls it in the same order, also one that neither sends nor receives. All stages'
        sends and receives of one call are one batch, so that no pair waits for another.

        Args:
            step: 1 for activations, -1 for gradients.
            sent: what this stage passes on, contiguous; held until the transfer was waited for.
            received_shape: of what this stage takes; None takes nothing.
        """
        me = dist.get_rank(self.group)
        operations, received = [], None
        if sent is not None:
            sent = sent.detach()  # a handle of its own: the caller may free the tensor's memory for autograd
            operations.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=me + step))
        if received_shape is not None:
            received = torch.empty(received_shape, dtype=self.dtype, device=self.device)
            operations.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=me - step))
        return StageTransfer(sent, received, dist.batch_isend_irecv(operations) if operations else [])


@dataclass
class StageTransfer:
    """A transfer under way; what is sent stays alive with it."""

    sent: torch.Tensor | None
    received: torch.Tensor | None
    works: list[Any]

    def wait(self) -> torch.Tensor | None:
        """Join it and return what was received; on a GPU only the stream waits, not the host."""
        for work in self.works:
            work.wait()
        self.sent, self.works = None, []
        return self.received
