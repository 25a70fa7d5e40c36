"""The server pool as one rank sees it, and the rank's attention server, which computes its CA-tasks on arrived rows.

Shape suffixes as in attention/kernel.py, with U key/value rows that arrived, which tasks may share, and V rows of the
nano-batch before. k and v travel together as kv_U2GD, or as [U, G, key and value] where values are narrower than keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from distca.attention import Kernel
from distca.device.offload import Offload
from distca.runtime.device_routes import ServerRoute, SharedRows
from distca.runtime.timeline import Timeline
from distca.transport import Transport


def task_regions(kv_U2GD: torch.Tensor, before_V2GD: torch.Tensor | None, route: ServerRoute) -> torch.Tensor:
    """kv_S2GD, the k,v rows of every task's region: copies of rows that arrived, and of the nano-batch before.

    Where no two tasks share rows, it is ``kv_U2GD`` itself."""
    if not route.repeats:
        return kv_U2GD
    kv_S2GD = kv_U2GD.new_empty(route.region_rows, *kv_U2GD.shape[1:])
    _copy(kv_U2GD, kv_S2GD, route.repeats)
    if route.before:
        assert before_V2GD is not None
        _copy(before_V2GD, kv_S2GD, route.before)
    return kv_S2GD


def keys_and_values(kv_S2GD: torch.Tensor, key_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k_SGD and v_SGD, as views of the rows in which they travel together."""
    if kv_S2GD.dim() == 4:
        return kv_S2GD[:, 0], kv_S2GD[:, 1]
    return kv_S2GD[..., :key_dim], kv_S2GD[..., key_dim:]


def together(k_SGD: torch.Tensor, v_SGD: torch.Tensor) -> torch.Tensor:
    """Keys and values, or their gradients, as the rows in which they travel: kv_S2GD where both have one width."""
    if k_SGD.shape == v_SGD.shape:
        return torch.stack((k_SGD, v_SGD), dim=1)
    return torch.cat((k_SGD, v_SGD), dim=-1)


def _copy(source: torch.Tensor, target: torch.Tensor, shared: list[SharedRows]) -> None:
    for each in shared:
        for offset, place, rows in each.places:
            begin = each.first + offset
            target[place : place + rows].copy_(source[begin : begin + rows])


Sums = dict[int, torch.Tensor]
"""Gradients in float32 of ranges of rows of a server's buffer, by first row."""


def added_up(dkv_S2GD: torch.Tensor, later: Sums, route: ServerRoute) -> torch.Tensor:
    """dkv_U2GD of the rows that arrived.

    Gradients of tasks that share rows are added in float32, the last task's first and then the others' in their order,
    and rounded once. Then gradients of the next nano-batch, ``later``, are added and rounded."""
    dkv_U2GD = dkv_S2GD
    if route.repeats:
        dkv_U2GD = dkv_S2GD.new_empty(route.kv_rows, *dkv_S2GD.shape[1:])
        for each in route.repeats:
            offset, place, rows = each.places[-1]
            begin = each.first + offset
            dkv_U2GD[begin : begin + rows].copy_(dkv_S2GD[place : place + rows])
            if len(each.places) > 1:
                total = _sum(dkv_S2GD, each)
                dkv_U2GD[each.first : each.first + len(total)] = total.to(dkv_S2GD.dtype)
    for first, total in later.items():
        dkv_U2GD[first : first + len(total)] = (total + dkv_U2GD[first : first + len(total)]).to(dkv_S2GD.dtype)
    return dkv_U2GD


def sums_of_before(dkv_S2GD: torch.Tensor, route: ServerRoute) -> Sums:
    """The gradients of rows of the nano-batch before."""
    return {each.first: _sum(dkv_S2GD, each) for each in route.before}


def _sum(dkv_S2GD: torch.Tensor, shared: SharedRows) -> torch.Tensor:
    """The sum in float32 of the gradients of a range of rows that several tasks read.

    It ends with the last row that two tasks read: the rows behind are read by the last task alone and need no sum. With
    a single task it has all rows."""
    *others, (offset, place, rows) = shared.places
    longest = max((offset + rows for offset, _, rows in others), default=rows)
    wide = torch.promote_types(dkv_S2GD.dtype, torch.float32)
    last = dkv_S2GD[place : place + longest - offset].to(wide, copy=True)
    total = last if not offset else torch.cat((last.new_zeros(offset, *last.shape[1:]), last))
    for offset, place, rows in others:
        total[offset : offset + rows] += dkv_S2GD[place : place + rows]
    return total


def compute_forward(
    kernel: Kernel, route: ServerRoute, q_THD: torch.Tensor, kv_S2GD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns o_THD and lse_TH of this server's tasks, computed by one kernel call for each run of one kind; empty
    tensors without tasks."""
    if len(route.batches) == 1:
        (only,) = route.batches
        return kernel.forward(q_THD, *keys_and_values(kv_S2GD, q_THD.shape[2]), only.batch, only.kind)
    _, v_SGD = keys_and_values(kv_S2GD, q_THD.shape[2])
    o_THD = q_THD.new_empty(*q_THD.shape[:2], v_SGD.shape[2])
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.promote_types(q_THD.dtype, torch.float32))
    for each in route.batches:
        k, v = keys_and_values(kv_S2GD[each.kv], q_THD.shape[2])
        o_THD[each.q], lse_TH[each.q] = kernel.forward(q_THD[each.q], k, v, each.batch, each.kind)
    return o_THD, lse_TH


def compute_backward(
    kernel: Kernel,
    route: ServerRoute,
    do_THD: torch.Tensor,
    q_THD: torch.Tensor,
    kv_S2GD: torch.Tensor,
    o_THD: torch.Tensor,
    lse_TH: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns dq_THD and dkv_S2GD of this server's tasks."""
    if len(route.batches) == 1:
        (only,) = route.batches
        k, v = keys_and_values(kv_S2GD, q_THD.shape[2])
        dq, dk, dv = kernel.backward(do_THD, q_THD, k, v, o_THD, lse_TH, only.batch, only.kind)
        return dq, together(dk, dv)
    dq_THD, dkv_S2GD = torch.empty_like(q_THD), torch.empty_like(kv_S2GD)
    dk_SGD, dv_SGD = keys_and_values(dkv_S2GD, q_THD.shape[2])
    for each in route.batches:
        q = each.q
        k, v = keys_and_values(kv_S2GD[each.kv], q_THD.shape[2])
        dq_THD[q], dk_SGD[each.kv], dv_SGD[each.kv] = kernel.backward(
            do_THD[q], q_THD[q], k, v, o_THD[q], lse_TH[q], each.batch, each.kind
        )
    return dq_THD, dkv_S2GD


@dataclass(frozen=True)
class AttentionPool:
    """All ranks that serve core attention to each other.

    Attributes:
        transport: moves rows between these ranks.
        kernel: computes CA-tasks on this rank.
        timeline: records what this rank does, and when.
        backward: with "keep", servers keep q, k, v, o and log-sum-exp of their tasks, and home ranks send only dO. With
            "resend", home ranks keep them and send them again with dO, to the servers that the backward plan names.
        offload: host memory for the rows that home ranks keep, and for the inputs of recomputed segments; None keeps
            all on the device.
    """

    transport: Transport
    kernel: Kernel
    timeline: Timeline
    backward: Literal["keep", "resend"] = "keep"
    offload: Offload | None = None
