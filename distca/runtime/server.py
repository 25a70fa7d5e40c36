"""The computation of a rank in its role of attention server, and the pool of ranks that serve each other.

A *CA-task* is a range of a document's queries with all keys and values that they see. A plan gives each task to a
server, and the task's rows travel there. The server's buffer holds each k,v row once, though several tasks may read it.
Kernels want every task's rows in one piece, its *region*, so :func:`task_regions` copies them. After backward,
:func:`added_up` adds the regions' gradients up again. ``AttentionCall`` (attention_call.py) calls these functions.

A micro-batch runs as two *nano-batches*, ping and then pong. Servers may keep ping's k,v rows for tasks of pong.

Shape suffixes: T query rows of the server's tasks; U k,v rows of its buffer; V k,v rows that it kept of ping; S k,v
rows of all regions; H query heads, G key/value heads, D head dimension; 2 stands for k and v. Values may be narrower
than keys; then k and v travel as [rows, G, width of a key + width of a value].
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
    """kv_S2GD, the regions of all tasks: copies of rows that arrived, and of rows that the server kept of ping.

    If no two tasks share rows and none are kept, it is ``kv_U2GD`` itself."""
    if not route.repeats:
        return kv_U2GD
    kv_S2GD = kv_U2GD.new_empty(route.region_rows, *kv_U2GD.shape[1:])
    _copy(kv_U2GD, kv_S2GD, route.repeats)
    if route.before:
        assert before_V2GD is not None
        _copy(before_V2GD, kv_S2GD, route.before)
    return kv_S2GD


def keys_and_values(kv_S2GD: torch.Tensor, key_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k_SGD and v_SGD, as views of the tensor in which they travel together."""
    if kv_S2GD.dim() == 4:
        return kv_S2GD[:, 0], kv_S2GD[:, 1]
    return kv_S2GD[..., :key_dim], kv_S2GD[..., key_dim:]


def together(k_SGD: torch.Tensor, v_SGD: torch.Tensor) -> torch.Tensor:
    """One tensor of keys and values, or of their gradients: the reverse of :func:`keys_and_values`."""
    if k_SGD.shape == v_SGD.shape:
        return torch.stack((k_SGD, v_SGD), dim=1)
    return torch.cat((k_SGD, v_SGD), dim=-1)


def _copy(source: torch.Tensor, target: torch.Tensor, shared: list[SharedRows]) -> None:
    """Copies rows of a server's buffer to the regions of all tasks that read them."""
    for each in shared:
        for offset, place, rows in each.places:
            begin = each.first + offset
            target[place : place + rows].copy_(source[begin : begin + rows])


Sums = dict[int, torch.Tensor]
"""Gradients in float32 of row ranges in a server's k,v buffer, by the first row of each range."""


def added_up(dkv_S2GD: torch.Tensor, later: Sums, route: ServerRoute) -> torch.Tensor:
    """dkv_U2GD, the gradients of the rows in the server's buffer, from those of the regions.

    Tasks that share a row have their gradients added in float32: the last task's first, then the others in order. The
    sum is rounded once. In ping, pong's gradients of kept rows (``later``) are then added, and the sum is rounded."""
    # The last task that shares a range reads it to its end. So its gradients are copied, and then the first part, which
    # other tasks read too, is overwritten with the sum.
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
    """In pong, the gradients of rows that the server kept of ping."""
    return {each.first: _sum(dkv_S2GD, each) for each in route.before}


def _sum(dkv_S2GD: torch.Tensor, shared: SharedRows) -> torch.Tensor:
    """The sum in float32 of the gradients of a range of rows that several tasks read.

    It ends with the last row that any task but the last reads; the rows after that have one gradient and need no sum.
    With a single task it has all rows. Example: two tasks read rows [0, 4) and [0, 7) of the range. The sum has 4
    rows."""
    # The last task may begin behind the first row of the range, at "offset"; its gradients there are zeros.
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
    """Returns o_THD and lse_TH (log-sum-exp) of this server's tasks; without tasks, tensors of 0 rows.

    There is one kernel call for each batch: consecutive tasks of layers with one window, scale and softcap."""
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
    """Returns dq_THD and dkv_S2GD of this server's tasks, with the same kernel calls as forward."""
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
    """All ranks that serve core attention to each other, as one of them sees the pool.

    A rank is the *home* of the rows that it holds between layers.

    Attributes:
        transport: moves rows between these ranks.
        kernel: computes CA-tasks on this rank.
        timeline: records the times of this rank's compute and transfers.
        backward: with "keep", servers keep q, k, v, o and lse of their tasks, and homes send only dO. With "resend",
            homes keep them and send them again with dO, to the servers that the backward plan names.
        offload: host memory for the rows that homes keep, and for the inputs of recomputed layers; None keeps both on
            the device.
    """

    transport: Transport
    kernel: Kernel
    timeline: Timeline
    backward: Literal["keep", "resend"] = "keep"
    offload: Offload | None = None
