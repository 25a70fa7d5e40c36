"""Steps of a mode, made in the background one ahead: DistCA's by its face, a baseline's here."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from functools import partial

import numpy as np

from benchmarks.baselines import Baseline, CpGroups, Mode, Work, groups_of
from benchmarks.throughput.batches import Batches, Replay
from distca import StepDocuments
from distca.baselines.dealing import dealt_anew
from distca.data.batch import rank_batch
from distca.data.sampler import MicroBatch
from distca.device.host_to_device import uploading
from distca.plan import StepPlan
from distca.plan.step import StepBalance
from distca.train.run.builder import Trainer
from megatron_patches.steps.device_batch import packed_batches
from megatron_patches.steps.step import Step
from megatron_patches.steps.steps_ahead import StepsAhead, planning_thread


def steps_ahead(
    mode: Mode, trainer: Trainer, batches: Batches, first: int, groups: CpGroups, work: Work
) -> Generator[Step, None, None]:
    """Steps of a mode, beginning with global batch ``first``. Every rank calls it together."""
    deal = None
    if mode.method == "packed-dealt":
        room = trainer.config.data.tokens_per_rank
        deal = partial(dealt_anew, ranks=trainer.cad.options.ranks, room=room, work=work)
    documents = _documents(batches, first, not mode.disaggregated, deal)
    if mode.disaggregated:
        return trainer.cad.plan_ahead(documents)
    made = map(_Baseline(mode, trainer, batches, groups, work).make, documents)
    return iter(StepsAhead(made, planning_thread(trainer.world.device)))


def _documents(
    batches: Batches,
    first: int,
    bins: bool,
    deal: Callable[[tuple[MicroBatch, ...]], tuple[MicroBatch, ...]] | None,
) -> Iterator[StepDocuments]:
    replay = Replay(batches.global_batches, first, bins)
    while True:
        micro_batches = replay.next()
        if deal is not None:
            micro_batches = deal(micro_batches)
        chosen = [batches.documents.choose(each.documents) for each in micro_batches]
        yield StepDocuments(chosen, [each.rank_of for each in micro_batches])


class _Baseline:
    def __init__(self, mode: Mode, trainer: Trainer, batches: Batches, groups: CpGroups, work: Work) -> None:
        self._mode, self._cad, self._work = mode, trainer.cad, work
        self._vocabulary = trainer.vocabulary  # which all tokens are drawn from
        self._bins, self._room = batches.bins, trainer.config.data.tokens_per_rank
        config = trainer.config
        self._baseline = Baseline(
            mode,
            trainer.cad.options.ranks,
            trainer.cad.rank,
            groups.of(mode.degree) if mode.degree > 1 else None,
            config.attention_shape,
            config.model.windows,
            {3} if config.model.hybrid.pattern else (),  # Megatron's convolutions read four rows
        )

    def make(self, documents: StepDocuments) -> Step:
        """Deal, lay out and load a global batch."""
        options, rank = self._cad.options, self._cad.rank
        rows, attention, layouts, lengths = [], [], [], []
        bytes_moved, planning_ms = 0, 0.0
        assert documents.homes is not None
        with uploading(self._cad.device) as upload:
            for micro_batch, bin_of in zip(documents.micro_batches, documents.homes, strict=True):
                assert bin_of is not None
                began = time.perf_counter()
                lengths.append(np.array([len(document) for document in micro_batch]))
                group_of = groups_of(self._mode, lengths[-1], bin_of, self._bins, options.ranks, self._room, self._work)
                made = self._baseline.prepare(lengths[-1], group_of, upload)
                planning_ms += (time.perf_counter() - began) * 1e3
                bytes_moved += made.bytes_moved * options.stages
                layouts.append((made.layout,))
                attention.append(made.attention)
                rows.append(rank_batch(micro_batch, layouts[-1], rank, align=options.align, chunks=options.shares))
            ready = packed_batches(rows, attention, options, upload)
        unplanned = np.zeros((1, 1, options.pool_ranks))
        plan = StepPlan(options, tuple(lengths), tuple(documents.homes), tuple(layouts), (), (), drawn=())
        balance = StepBalance(unplanned, unplanned, unplanned[0], bytes_moved)
        return Step(documents, plan, balance, None, ready, planning_ms, vocabulary=self._vocabulary)
