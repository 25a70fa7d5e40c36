"""The server pool as one rank sees it, and its in-place attention server, which runs this rank's fused batch of
CA-tasks on the rows that arrived.

Shape suffixes as in attention/kernel.py; k and v travel together as kv_S2GD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from distca.attention import Kernel
from distca.runtime.device_routes import ServerRoute
from distca.runtime.timeline import Timeline
from distca.transport import Transport


def fill_repeats(kv_S2GD: torch.Tensor, route: ServerRoute) -> None:
    """Copy context rows that several tasks of one document need, after they arrived once."""
    for source, copies in route.repeats.items():
        for target, rows in copies:
            kv_S2GD[target : target + rows].copy_(kv_S2GD[source : source + rows])


def fold_repeats(dkv_S2GD: torch.Tensor, route: ServerRoute) -> None:
    """Add the gradients of repeated rows into the rows that arrived: in float32, in task order, rounded once."""
    wide = torch.promote_types(dkv_S2GD.dtype, torch.float32)
    for source, copies in route.repeats.items():
        longest = max(rows for _, rows in copies)
        total = dkv_S2GD[source : source + longest].to(wide)
        for target, rows in copies:
            total[:rows] += dkv_S2GD[target : target + rows]
        dkv_S2GD[source : source + longest] = total.to(dkv_S2GD.dtype)


def serve_forward(
    kernel: Kernel, route: ServerRoute, q_THD: torch.Tensor, kv_S2GD: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o_THD and lse_TH of this server's tasks; a server without tasks returns empty tensors."""
    if not len(route.batch):
        wide = torch.promote_types(q_THD.dtype, torch.float32)
        return torch.empty_like(q_THD), q_THD.new_empty(q_THD.shape[:2], dtype=wide)
    return kernel.forward(q_THD, kv_S2GD[:, 0], kv_S2GD[:, 1], route.batch, scale)


def serve_backward(
    kernel: Kernel,
    route: ServerRoute,
    do_THD: torch.Tensor,
    q_THD: torch.Tensor,
    kv_S2GD: torch.Tensor,
    o_THD: torch.Tensor,
    lse_TH: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dq_THD and dkv_S2GD of this server's tasks."""
    if not len(route.batch):
        return torch.empty_like(q_THD), torch.empty_like(kv_S2GD)
    dq, dk, dv = kernel.backward(do_THD, q_THD, kv_S2GD[:, 0], kv_S2GD[:, 1], o_THD, lse_TH, route.batch, scale)
    return dq, torch.stack((dk, dv), dim=1)


@dataclass(frozen=True)
class AttentionPool:
    """All ranks that serve core attention to each other.

    Attributes:
        transport: moves rows between them.
        kernel: computes CA-tasks on this rank.
        timeline: records what this rank does when.
        backward: "keep": servers keep q, k, v, o and log-sum-exp of their tasks, home ranks send only dO. "resend":
            home ranks keep them and send them again with dO, to the servers that the backward plan names.
    """

    transport: Transport
    kernel: Kernel
    timeline: Timeline
    backward: Literal["keep", "resend"] = "keep"
