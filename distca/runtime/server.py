"""The compute of a *server*: a rank that computes attention for rows of other ranks, and of its own if it has any.

- task: a range of a document's queries, with all keys and values that they attend to.
- buffer: the k,v rows (one token's key and value) that came to the server. A row that several tasks read is there once.
- region: one task's k,v rows, contiguous for the kernel.
- range (``SharedRows``): a run of buffer rows from row ``first``, which one or more tasks read. ``places`` lists the
  copies from this range to the regions: first buffer row minus ``first``, first row in the regions, number of rows.
  A copy may serve several tasks whose rows follow each other.
- ping, pong: the first and the second part of a micro-batch. Tasks of pong may read k,v rows that arrived in ping.

Shape suffixes: T query rows of the tasks; U k,v rows of the buffer; V k,v rows that arrived in ping; S k,v rows of all
regions; H query heads, G key/value heads, D head dimension; 2 stands for k and v. If values are narrower than keys,
``2GD`` tensors have shape [rows, G, elements of a key + elements of a value].
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
    """Returns kv_S2GD, the regions of all tasks; ``kv_U2GD`` itself if its rows already lie region by region.

    ``route.repeats`` has the ranges of ``kv_U2GD``, and ``route.before`` those of ``before_V2GD``."""
    if not route.repeats:
        return kv_U2GD
    kv_S2GD, (copies, copies_of_before) = kv_U2GD.new_empty(route.region_rows, *kv_U2GD.shape[1:]), route.copies
    copies.run(kv_U2GD, kv_S2GD)
    if route.before:
        assert before_V2GD is not None
        copies_of_before.run(before_V2GD, kv_S2GD)
    return kv_S2GD


def keys_and_values(kv_S2GD: torch.Tensor, key_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns k_SGD and v_SGD as views of ``kv_S2GD``; ``key_dim`` is the number of elements of a key."""
    if kv_S2GD.dim() == 4:
        return kv_S2GD[:, 0], kv_S2GD[:, 1]
    return kv_S2GD[..., :key_dim], kv_S2GD[..., key_dim:]


def together(k_SGD: torch.Tensor, v_SGD: torch.Tensor) -> torch.Tensor:
    """Returns kv_S2GD from keys and values, or from gradients of keys and values."""
    if k_SGD.shape == v_SGD.shape:
        return torch.stack((k_SGD, v_SGD), dim=1)
    return torch.cat((k_SGD, v_SGD), dim=-1)


Sums = dict[int, torch.Tensor]
"""Gradients of ranges of the buffer, by the range's first row; float32, or float64 for rows in float64."""


def added_up(dkv_S2GD: torch.Tensor, later: Sums, route: ServerRoute) -> torch.Tensor:
    """Returns dkv_U2GD, the gradients of the rows in the server's buffer.

    Gradients of a row are added in float32 or float64, in a fixed order, and the sum is rounded. Then ``later`` is
    added to the rounded sum, and the result is rounded again.

    Args:
        dkv_S2GD: gradients of the regions.
        later: in ping, gradients that pong's tasks computed for rows of this buffer; empty in pong.
    """
    # The last copy of a range ends at the range's end. The gradients of its rows are copied back. Then sums overwrite
    # all rows that are in other copies too.
    dkv_U2GD = dkv_S2GD
    if route.repeats:
        dkv_U2GD = dkv_S2GD.new_empty(route.kv_rows, *dkv_S2GD.shape[1:])
        route.copies_back.run(dkv_S2GD, dkv_U2GD)
        for each in route.repeats:
            if len(each.places) > 1:
                total = _sum(dkv_S2GD, each)
                dkv_U2GD[each.first : each.first + len(total)] = total.to(dkv_S2GD.dtype)
    for first, total in later.items():
        dkv_U2GD[first : first + len(total)] = (total + dkv_U2GD[first : first + len(total)]).to(dkv_S2GD.dtype)
    return dkv_U2GD


def sums_of_before(dkv_S2GD: torch.Tensor, route: ServerRoute) -> Sums:
    """Returns the gradients that tasks of pong computed for k,v rows that arrived in ping.

    Every task that reads rows of such a range reads the whole range. So :func:`_sum` returns all of its rows."""
    return {each.first: _sum(dkv_S2GD, each) for each in route.before}


def _sum(dkv_S2GD: torch.Tensor, shared: SharedRows) -> torch.Tensor:
    """Returns the gradients of a range's first rows, summed over tasks.

    Example: two tasks read rows [0, 4) and [0, 7) of the range. The result has 4 rows, since only the last task reads
    rows [4, 7). With a single task the result has all rows of the range."""
    # If the last task begins behind the range's first row, zeros stand for the rows that the task does not read.
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
    """Returns o_THD and lse_TH (log-sum-exp of scores) of this server's tasks.

    ``route.batches`` are runs of tasks of one kind (``AttentionKind``). Each run is one kernel call."""
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
    """One rank's transport, kernel and timeline in a *pool*: a group of ranks that compute attention for each other.

    The *home* of a row is the rank that holds the row between layers.

    Attributes:
        timeline: records the times of this rank's compute and transfers.
        backward: "keep" if servers keep q, k and v until backward; "resend" if homes send them again.
        offload: host memory for rows that homes keep with "resend", and for the inputs of recomputed layers; with None
            both stay on the device.
        homes: transport between the ranks with a model, for recurrent layers (linear attention, SSM). If it is None,
            these layers use ``transport``.
    """

    transport: Transport
    kernel: Kernel
    timeline: Timeline
    backward: Literal["keep", "resend"] = "keep"
    offload: Offload | None = None
    homes: Transport | None = None
