"""The server pool as one rank sees it, and its in-place attention server, which runs this rank's fused batch of
CA-tasks on the rows that arrived.

Shape suffixes as in attention/kernel.py, with U key/value rows that arrived, which tasks may share, and V rows of the
half before; k and v travel together as kv_U2GD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from distca.attention import Kernel
from distca.device.offload import Offload
from distca.runtime.device_routes import ServerRoute
from distca.runtime.timeline import Timeline
from distca.transport import Transport


def task_regions(kv_U2GD: torch.Tensor, before_V2GD: torch.Tensor | None, route: ServerRoute) -> torch.Tensor:
    """kv_S2GD, the context rows of every task: from those that arrived, and from those of the half before. The same
    tensor where no two tasks share any."""
    if not route.repeats:
        return kv_U2GD
    kv_S2GD = kv_U2GD.new_empty(int(route.batch.borders_kv[-1]), *kv_U2GD.shape[1:])
    _copy(kv_U2GD, kv_S2GD, route.repeats)
    if route.before:
        assert before_V2GD is not None
        _copy(before_V2GD, kv_S2GD, route.before)
    return kv_S2GD


def _copy(source: torch.Tensor, target: torch.Tensor, copies: dict[int, list[tuple[int, int]]]) -> None:
    for first, places in copies.items():
        for place, rows in places:
            target[place : place + rows].copy_(source[first : first + rows])


Sums = dict[int, torch.Tensor]
"""Of a server's buffer: by first row, gradients in float32 of so many rows."""


def added_up(dkv_S2GD: torch.Tensor, later: Sums, route: ServerRoute) -> torch.Tensor:
    """dkv_U2GD of the rows that arrived: gradients of tasks that share rows are added in float32, in task order, and
    rounded once; then those of the half that comes ``later`` are."""
    dkv_U2GD = dkv_S2GD
    if route.repeats:
        dkv_U2GD = dkv_S2GD.new_empty(route.kv_rows, *dkv_S2GD.shape[1:])
        for first, places in route.repeats.items():
            # The last task of a document has all of its rows that arrived.
            place, rows = places[-1]
            dkv_U2GD[first : first + rows].copy_(dkv_S2GD[place : place + rows])
            if len(places) > 1:
                total = _sum(dkv_S2GD, places[:-1], dkv_S2GD[place : place + rows])
                dkv_U2GD[first : first + len(total)] = total.to(dkv_S2GD.dtype)
    for first, total in later.items():
        dkv_U2GD[first : first + len(total)] = (total + dkv_U2GD[first : first + len(total)]).to(dkv_S2GD.dtype)
    return dkv_U2GD


def sums_of_before(dkv_S2GD: torch.Tensor, route: ServerRoute) -> Sums:
    """Gradients of the rows that are of the half before."""
    sums = {}
    for first, places in route.before.items():
        place, rows = places[-1]
        sums[first] = _sum(dkv_S2GD, places[:-1], dkv_S2GD[place : place + rows])
    return sums


def _sum(dkv_S2GD: torch.Tensor, places: list[tuple[int, int]], last: torch.Tensor) -> torch.Tensor:
    """Of the ``last`` task's rows and those at ``places``, in float32; as many rows as the longest of these has, or all
    where there is none."""
    longest = max((rows for _, rows in places), default=len(last))
    total = last[:longest].to(torch.promote_types(last.dtype, torch.float32), copy=True)
    for place, rows in places:
        total[:rows] += dkv_S2GD[place : place + rows]
    return total


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
        offload: where home ranks keep them meanwhile, and blocks what goes into recomputed segments; None keeps all on
            the device.
    """

    transport: Transport
    kernel: Kernel
    timeline: Timeline
    backward: Literal["keep", "resend"] = "keep"
    offload: Offload | None = None
