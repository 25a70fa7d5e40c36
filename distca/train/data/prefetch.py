"""What a step needs before the GPU starts on it: plans, routes and this rank's tokens, made one step ahead.

Every rank knows the lengths of all documents, so every rank plans the same without talking, in a background thread,
while the step before runs. The training loop only waits if planning takes longer than a step; it measures that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from distca.attention import TaskBatch
from distca.data.batch import RankBatch, rank_batch
from distca.data.corpus import DocumentSet
from distca.data.sampler import MicroBatch, Sampler
from distca.device.host_to_device import Upload, uploading
from distca.plan import Layout
from distca.plan.cost_correction import WHOLE_STEP, Learned, Learnings, ServerWork, work_of
from distca.plan.micro_batch import MicroBatchPlan, plan_micro_batch
from distca.plan.plan import fingerprint
from distca.runtime import NanoRoutes
from distca.train.data.pipeline_inputs import PipelineInputs, plan_pipeline, with_equal_rows
from distca.train.data.plan_options import Planning
from megatron_patches.batch_context import DisaggregatedMicroBatch, PackedMicroBatch
from megatron_patches.training_step import DeviceBatch


@dataclass(frozen=True)
class StepInputs:
    """One global batch, ready to run.

    Attributes:
        batches: this rank's micro-batches on its device.
        pipeline: plan and routes of all phases, where core attention is disaggregated over pipeline stages.
        seconds_before: [phases, pool ranks] planned attention seconds of one layer with documents in order, computed at
            home. Without pipeline stages a phase is a micro-batch, forward and backward.
        seconds_after: [phases, pool ranks] the same as planned, with all that was learned.
        seconds_beside: [phases, pool ranks] what the plan counts as computed beside attention, for each layer; 0 where
            it levels attention alone.
        learned: by phase, what the plan counts with.
        work: [phases, pool ranks] what servers were given of one layer, by the cost model alone.
        bytes_moved: bytes that travel for one layer (of every stage) in the whole step.
        lengths: tokens of every document of the global batch.
        sampler_state: where the sampler stood after it dealt this batch.
        planning_ms: milliseconds of planning and routing.
        fingerprint: of all plans of the step; every rank must have the same.
    """

    batches: tuple[DeviceBatch, ...]
    pipeline: PipelineInputs | None
    seconds_before: np.ndarray
    seconds_after: np.ndarray
    seconds_beside: np.ndarray
    learned: tuple[Learned, ...]
    work: ServerWork
    bytes_moved: int
    lengths: np.ndarray
    sampler_state: dict[str, Any]
    planning_ms: float
    fingerprint: int


def make_step_inputs(
    planning: Planning, documents: DocumentSet, sampler: Sampler, learned: Learnings = MappingProxyType({})
) -> StepInputs:
    """Deal, plan and load the next global batch.

    Args:
        planning: how, and this rank's place.
        documents: to deal from.
        sampler: says which are next.
        learned: what earlier steps showed.
    """
    micro_batches = sampler.next()
    state = sampler.state_dict()
    make = _pipelined if planning.stages > 1 and planning.disaggregate else _one_stage
    with uploading(planning.device) as upload:
        return make(planning, documents, micro_batches, state, upload, learned)


def _one_stage(
    planning: Planning,
    documents: DocumentSet,
    micro_batches: Sequence[MicroBatch],
    state: dict[str, Any],
    upload: Upload,
    learned: Learnings,
) -> StepInputs:
    own = learned.get(WHOLE_STEP, Learned.nothing(planning.pool_ranks))
    cost = own.cost(planning.cost)
    plans, attentions, batches, planning_ms = [], [], [], 0.0
    attention = _disaggregated if planning.disaggregate else _packed
    for micro_batch in micro_batches:
        began = time.perf_counter()
        plan = plan_micro_batch(
            micro_batch.lengths,
            planning.ranks,
            cost,
            nano_batches=planning.nano_batches,
            rank_of=micro_batch.rank_of,
            align=planning.chunks,
            resend=planning.resend,
            disaggregate=planning.disaggregate,
            tolerance=planning.tolerance,
            speeds=own.speeds,
            links=planning.links,
        )
        ready = attention(planning, plan, upload)
        planning_ms += (time.perf_counter() - began) * 1e3
        rows = _rows(planning, documents, micro_batch, tuple(nano.layout for nano in plan.nano_batches))
        plans.append(plan)
        attentions.append(ready)
        batches.append(rows)
    if planning.stages > 1:
        batches = with_equal_rows(batches)
    given = [work_of(plan.directed, planning.cost, planning.ranks) for plan in plans]
    return StepInputs(
        tuple(on_device(upload, rows, ready(rows)) for rows, ready in zip(batches, attentions, strict=True)),
        None,
        # Every stage's ranks hold the same rows.
        np.tile([plan.seconds_before for plan in plans], planning.stages),
        np.tile([plan.seconds_after for plan in plans], planning.stages) / own.speeds,
        np.zeros((len(plans), planning.pool_ranks)),
        (own,) * len(plans),
        ServerWork.of_phases(given, planning.stages),
        sum(plan.bytes_moved.total for plan in plans),
        np.concatenate([micro_batch.lengths for micro_batch in micro_batches]),
        state,
        planning_ms,
        fingerprint(each for plan in plans for each in plan.plans),
    )


def _pipelined(
    planning: Planning,
    documents: DocumentSet,
    micro_batches: Sequence[MicroBatch],
    state: dict[str, Any],
    upload: Upload,
    learned: Learnings,
) -> StepInputs:
    began = time.perf_counter()
    pipeline = plan_pipeline(planning, micro_batches, upload, learned)
    planning_ms = (time.perf_counter() - began) * 1e3
    batches = []
    for micro_batch, layouts, routes in zip(micro_batches, pipeline.layouts, pipeline.routes.busy, strict=True):
        rows = _rows(planning, documents, micro_batch, layouts)
        attention = DisaggregatedMicroBatch(routes, rows.nano_rows, planning.chunks)
        batches.append(on_device(upload, rows, attention))
    return StepInputs(
        tuple(batches),
        pipeline,
        pipeline.seconds_before,
        pipeline.seconds_after,
        pipeline.seconds_beside,
        pipeline.learned,
        pipeline.work,
        pipeline.bytes_moved,
        np.concatenate([micro_batch.lengths for micro_batch in micro_batches]),
        state,
        planning_ms,
        fingerprint(pipeline.plan.plans),
    )


def _rows(
    planning: Planning, documents: DocumentSet, micro_batch: MicroBatch, layouts: tuple[Layout, ...]
) -> RankBatch:
    return rank_batch(documents, micro_batch, layouts, planning.rank, align=planning.chunks, chunks=planning.chunks)


Attention = DisaggregatedMicroBatch | PackedMicroBatch


def _disaggregated(planning: Planning, plan: MicroBatchPlan, upload: Upload) -> Callable[[RankBatch], Attention]:
    routes, previous = [], None
    for nano in plan.nano_batches:
        routes.append(NanoRoutes.of(nano.forward, nano.backward, planning.rank, upload, previous))
        previous = nano.layout
    by_layer = (tuple(routes),) * planning.layers.most
    return lambda rows: DisaggregatedMicroBatch(by_layer, rows.nano_rows, planning.chunks)


def _packed(planning: Planning, plan: MicroBatchPlan, upload: Upload) -> Callable[[RankBatch], Attention]:
    layout = plan.nano_batches[0].layout
    mine = layout.q.on_rank(planning.rank)
    assert (mine.start == 0).all() and (mine.stop == layout.last[mine.document]).all(), "documents must be whole"
    borders = np.concatenate(([0], np.cumsum(mine.stop)))
    batch = TaskBatch.of(borders, borders, upload)
    return lambda rows: PackedMicroBatch(batch, int(borders[-1]))


def on_device(upload: Upload, rows: RankBatch, attention: Attention) -> DeviceBatch:
    """A rank's rows of a micro-batch, which are there once ``upload`` was sent."""
    columns = (rows.tokens, rows.labels, rows.loss_mask, rows.positions)
    tokens, labels, loss_mask, positions = (upload.add(column) for column in columns)
    return DeviceBatch(tokens[None], labels[None], loss_mask, positions, attention)


class Ahead:
    """Makes step inputs in a background thread, one step ahead.

    Args:
        make: makes the next inputs; only ever called by one thread at a time, in order.
        device: the device that the thread copies to.
    """

    def __init__(self, make: Callable[..., StepInputs], device: torch.device) -> None:
        self._make = make
        select = (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else (lambda: None)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="distca-planning", initializer=select)
        self._next: Future[StepInputs] | None = None

    def start(self, **how: Any) -> None:
        """Begin with the next inputs, unless they are being made already; ``how`` goes to ``make``."""
        if self._next is None:
            self._next = self._thread.submit(self._make, **how)

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
