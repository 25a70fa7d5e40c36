"""What a step needs before the GPU starts on it: plans, routes and this rank's tokens, made one step ahead.

Every rank knows the lengths of all documents, so every rank plans the same without talking, in a background thread,
while the step before runs. The training loop only waits if planning takes longer than a step; it measures that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from distca.attention import TaskBatch
from distca.attention.kernel import to_device
from distca.data.batch import RankBatch, rank_batch
from distca.data.corpus import DocumentSet
from distca.data.sampler import Sampler
from distca.plan.cost import CostModel
from distca.plan.micro_batch import MicroBatchPlan, plan_micro_batch
from distca.runtime import NanoRoutes
from megatron_patches.micro_batch import DisaggregatedMicroBatch, PackedMicroBatch
from megatron_patches.training_step import DeviceBatch


@dataclass(frozen=True)
class Planning:
    """How micro-batches are planned; the same on every rank.

    Attributes:
        rank: this rank in the server pool.
        ranks: size of the pool.
        cost: seconds per CA-task.
        disaggregate: False computes every document at home.
        nano_batches: 1, or 2 for ping and pong.
        resend: whether backward has servers of its own.
        tolerance: how far above the mean the busiest server may be.
        chunks: tensor-parallel ranks that share a micro-batch's rows (sequence parallelism).
        device: where tensors go.
    """

    rank: int
    ranks: int
    cost: CostModel
    disaggregate: bool
    nano_batches: int
    resend: bool
    tolerance: float
    chunks: int
    device: torch.device


@dataclass(frozen=True)
class StepInputs:
    """One global batch, ready to run.

    Attributes:
        batches: this rank's micro-batches on its device.
        plans: their plans.
        seconds_before: [ranks] planned attention seconds of one layer with documents in order, computed at home.
        seconds_after: [ranks] the same as planned.
        lengths: tokens of every document of the global batch.
        sampler_state: where the sampler stood after it dealt this batch.
        planning_ms: milliseconds of planning and routing.
    """

    batches: tuple[DeviceBatch, ...]
    plans: tuple[MicroBatchPlan, ...]
    seconds_before: np.ndarray
    seconds_after: np.ndarray
    lengths: np.ndarray
    sampler_state: dict[str, Any]
    planning_ms: float


def make_step_inputs(planning: Planning, documents: DocumentSet, sampler: Sampler) -> StepInputs:
    """Deal, plan and load the next global batch."""
    micro_batches = sampler.next()
    state = sampler.state_dict()
    plans, batches, planning_ms = [], [], 0.0
    for micro_batch in micro_batches:
        began = time.perf_counter()
        plan = plan_micro_batch(
            micro_batch.lengths,
            planning.ranks,
            planning.cost,
            nano_batches=planning.nano_batches,
            rank_of=micro_batch.rank_of,
            align=planning.chunks,
            resend=planning.resend,
            disaggregate=planning.disaggregate,
            tolerance=planning.tolerance,
        )
        attention = _disaggregated if planning.disaggregate else _packed
        ready = attention(planning, plan)
        planning_ms += (time.perf_counter() - began) * 1e3
        layouts = tuple(nano.layout for nano in plan.nano_batches)
        rows = rank_batch(documents, micro_batch, layouts, planning.rank, align=planning.chunks, chunks=planning.chunks)
        plans.append(plan)
        batches.append(_on_device(planning, rows, ready(rows)))
    lengths = np.concatenate([micro_batch.lengths for micro_batch in micro_batches])
    return StepInputs(
        tuple(batches),
        tuple(plans),
        np.sum([plan.seconds_before for plan in plans], axis=0),
        np.sum([plan.seconds_after for plan in plans], axis=0),
        lengths,
        state,
        planning_ms,
    )


Attention = DisaggregatedMicroBatch | PackedMicroBatch


def _disaggregated(planning: Planning, plan: MicroBatchPlan) -> Callable[[RankBatch], Attention]:
    routes, previous = [], None
    for nano in plan.nano_batches:
        routes.append(NanoRoutes.of(nano.forward, nano.backward, planning.rank, planning.device, previous))
        previous = nano.layout
    return lambda rows: DisaggregatedMicroBatch(routes, rows.nano_rows, planning.chunks)


def _packed(planning: Planning, plan: MicroBatchPlan) -> Callable[[RankBatch], Attention]:
    layout = plan.nano_batches[0].layout
    mine = layout.q.on_rank(planning.rank)
    assert (mine.start == 0).all() and (mine.stop == layout.last[mine.document]).all(), "documents must be whole"
    borders = np.concatenate(([0], np.cumsum(mine.stop)))
    batch = TaskBatch.of(borders, borders, planning.device)
    return lambda rows: PackedMicroBatch(batch, int(borders[-1]))


def _on_device(planning: Planning, rows: RankBatch, attention: Attention) -> DeviceBatch:
    def column(array: np.ndarray) -> torch.Tensor:
        return to_device(array, planning.device)

    return DeviceBatch(
        column(rows.tokens)[None], column(rows.labels)[None], column(rows.loss_mask), column(rows.positions), attention
    )


class Ahead:
    """Makes step inputs in a background thread, one step ahead.

    Args:
        make: makes the next inputs; only ever called by one thread at a time, in order.
        device: the device that the thread copies to.
    """

    def __init__(self, make: Callable[[], StepInputs], device: torch.device) -> None:
        self._make = make
        select = (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else (lambda: None)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="distca-planning", initializer=select)
        self._next: Future[StepInputs] | None = None

    def start(self) -> None:
        """Begin with the next inputs, unless they are being made already."""
        if self._next is None:
            self._next = self._thread.submit(self._make)

    def take(self) -> tuple[StepInputs, float]:
        """The next inputs, and the milliseconds that the caller waited for them."""
        self.start()
        assert self._next is not None
        began = time.perf_counter()
        inputs = self._next.result()
        self._next = None
        return inputs, (time.perf_counter() - began) * 1e3

    def close(self) -> None:
        """Forget what was made ahead and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
