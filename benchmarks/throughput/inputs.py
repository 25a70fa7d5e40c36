"""A baseline's step inputs, made in the background one step ahead, as DistCA's are."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
from distca.train.data.pipeline_inputs import with_equal_rows
from distca.train.data.prefetch import Ahead, StepInputs, make_step_inputs, on_device

from benchmarks.baselines import CpGroups, Mode, Work, groups_of, prepare
from benchmarks.throughput.batches import Batches, Replay
from distca.data.batch import rank_batch
from distca.device.host_to_device import Upload, uploading
from distca.plan import AttentionShape
from distca.train.run.builder import Trainer


def inputs_ahead(mode: Mode, trainer: Trainer, batches: Batches, first: int, groups: CpGroups, work: Work) -> Ahead:
    """Step inputs of a mode, beginning with global batch ``first``. Every rank calls it together."""
    planning = trainer.planning
    replay = Replay(batches.global_batches, first, bins=mode.method != "distca")
    make: Callable[[], StepInputs]
    if mode.method == "distca":
        make = partial(make_step_inputs, planning, batches.documents, replay)  # type: ignore[arg-type]
    else:
        make = _Baseline(mode, trainer, batches, groups, work, replay).make
    return Ahead(make, planning.device)


class _Baseline:
    def __init__(
        self, mode: Mode, trainer: Trainer, batches: Batches, groups: CpGroups, work: Work, replay: Replay
    ) -> None:
        self._mode, self._planning, self._replay, self._work = mode, trainer.planning, replay, work
        self._documents, self._bins = batches.documents, batches.bins
        self._room = trainer.config.data.tokens_per_rank
        self._group = groups.of(mode.degree) if mode.degree > 1 else None
        self._shape = shape_of(trainer)

    def make(self) -> StepInputs:
        """Deal, lay out and load the next global batch."""
        with uploading(self._planning.device) as upload:
            return self._make(upload)

    def _make(self, upload: Upload) -> StepInputs:
        planning, ready = self._planning, []
        bytes_moved, planning_ms = 0, 0.0
        micro_batches = self._replay.next()
        for micro_batch in micro_batches:
            began = time.perf_counter()
            assert micro_batch.rank_of is not None
            group_of = groups_of(
                self._mode, micro_batch.lengths, micro_batch.rank_of, self._bins, planning.ranks, self._room, self._work
            )
            made = prepare(
                self._mode,
                micro_batch.lengths,
                group_of,
                planning.ranks,
                self._group,
                planning.rank,
                self._shape,
                upload,
            )
            planning_ms += (time.perf_counter() - began) * 1e3
            bytes_moved += made.bytes_moved * planning.stages
            rows = rank_batch(
                self._documents,
                micro_batch,
                (made.layout,),
                planning.rank,
                align=planning.chunks,
                chunks=planning.chunks,
            )
            ready.append((rows, made.attention))
        columns = [rows for rows, _ in ready]
        if planning.stages > 1:
            columns = with_equal_rows(columns)
        unplanned = np.zeros((1, planning.pool_ranks))
        return StepInputs(
            tuple(on_device(upload, rows, each) for rows, (_, each) in zip(columns, ready, strict=True)),
            None,
            unplanned,
            unplanned,
            unplanned,
            bytes_moved,
            np.concatenate([micro_batch.lengths for micro_batch in micro_batches]),
            {},
            planning_ms,
            0,
        )


def shape_of(trainer: Trainer) -> AttentionShape:
    """Attention heads of one tensor-parallel rank."""
    model, tp = trainer.config.model, trainer.config.parallel.tp
    value_bytes = 2 if trainer.config.train.precision == "bf16" else 4
    return AttentionShape(model.heads // tp, model.kv_heads // tp, model.resolved_head_dim, value_bytes)


def check_fits(mode: Mode, batches: Batches, ranks: int, room: int, work: Work) -> None:
    """Refuse a mode that one of the batches does not fit.

    Raises:
        BaselineError: in a sentence.
    """
    for batch in batches.global_batches:
        for micro_batch in batch:
            assert micro_batch.rank_of is not None
            if mode.method != "distca":
                groups_of(mode, micro_batch.lengths, micro_batch.rank_of, batches.bins, ranks, room, work)
