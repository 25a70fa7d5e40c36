"""One mode on one workload: build, warm up, measure, trace, free."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.baselines import CpGroups, Mode, Work
from benchmarks.throughput.batches import Batches
from benchmarks.throughput.busy import trace
from benchmarks.throughput.gpu_state import GpuState
from benchmarks.throughput.inputs import steps_ahead
from benchmarks.throughput.record import RankRecord, of_all_ranks
from benchmarks.throughput.settings import Cell, Settings
from distca.device.memory import outside_torch
from distca.train.config.schema import RunConfig
from distca.train.run.builder import Trainer, build_trainer
from distca.train.run.garbage import SteadyGarbage
from distca.train.run.memory import predict_memory
from megatron_patches.ranks.world import World
from megatron_patches.steps.step import Step
from megatron_patches.te import quantization
from megatron_patches.training.training_step import sum_over_ranks, summed_loss_step

_KEPT_EVERY = 10  # measured batches, which is what a time limit costs a mode at most


def config_of(mode: Mode, settings: Settings, cell: Cell, world: World) -> RunConfig:
    """The training configuration that a mode runs with."""
    config = settings.config
    data = replace(config.data, source="mix", path=cell.mix, context_length=cell.context)
    cad = replace(config.cad, enabled=mode.disaggregated)
    if mode.unsplit:
        cad = replace(cad, ping_pong=False)
    train = config.train if cad.enabled else replace(config.train, offload="none")
    if world.device.type == "cuda" and settings.slow_links:  # limits on links are NCCL's
        cad = replace(cad, transport="nccl")
    return replace(config, data=data, cad=cad, train=train)


def measure_mode(
    mode: Mode,
    settings: Settings,
    cell: Cell,
    world: World,
    batches: Batches,
    groups: Callable[[], CpGroups],
    work: Work,
    advance: Callable[[dict[str, Any]], None],
    keep: Callable[[list[RankRecord]], None],
) -> list[RankRecord]:
    """Train on all batches; returns every rank's record, on every rank. Every rank calls it together.

    Args:
        mode: how to train.
        settings: of the run.
        cell: the workload.
        world: this process's place.
        batches: its global batches.
        groups: makes or finds the context-parallel groups, once megatron's groups are there.
        work: what documents cost, for dealing them.
        advance: called after every step with its figures.
        keep: called between steps, now and then, with every rank's record so far.
    """
    trainer = build_trainer(config_of(mode, settings, cell, world), world, settings.config.model.vocabulary)
    run = _Run(trainer, world, advance)
    with SteadyGarbage() as garbage:
        run.garbage = garbage
        steps = steps_ahead(mode, trainer, batches, 0, groups(), work)
        record = run.measured(
            steps, settings.warm_up, settings.batches, lambda so_far: keep(of_all_ranks(so_far, world.size))
        )
        steps.close()
        if settings.traced and run.on_gpu:
            steps = steps_ahead(mode, trainer, batches, settings.warm_up, groups(), work)
            record.traced = trace(partial(run.steps, steps, settings.traced))
            steps.close()
    del run, trainer, steps
    give_back(world)
    return of_all_ranks(record, world.size)


class _Run:
    def __init__(self, trainer: Trainer, world: World, advance: Callable[[dict[str, Any]], None]) -> None:
        self._trainer, self._advance = trainer, advance
        trainer.cad.pool.timeline.times_waits = trainer.config.cad.enabled
        self.on_gpu = world.device.type == "cuda"
        self._device, self._watches = world.device, self.on_gpu and world.rank == 0
        self.garbage = SteadyGarbage()

    def measured(
        self, steps: Iterator[Step], warm_up: int, batches: int, keep: Callable[[RankRecord], None]
    ) -> RankRecord:
        for _ in range(warm_up):
            self._step(steps, RankRecord())
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        record = RankRecord()
        with GpuState() if self._watches else nullcontext() as state:
            for done in range(1, batches + 1):
                self._step(steps, record)
                if done % _KEPT_EVERY == 0 and done < batches:
                    self._keep_so_far(record, keep)
        if state is not None:
            record.gpus = state.summaries(torch.cuda.device_count())
        self._note_memory(record)
        return record

    def _keep_so_far(self, record: RankRecord, keep: Callable[[RankRecord], None]) -> None:
        """Between steps. What it leaves behind is collected here: the next step's collection is timed."""
        self._note_memory(record)
        keep(record)
        self.garbage.collect()

    def steps(self, steps: Iterator[Step], count: int) -> None:
        for _ in range(count):
            self._step(steps, RankRecord())

    def _step(self, steps: Iterator[Step], record: RankRecord) -> None:
        # As in distca.train.run.loop; the loss on the host is the step's one synchronisation.
        trainer = self._trainer
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        step = next(steps)
        reports = trainer.cad.forward_backward(step, summed_loss_step, trainer.model)
        total, tokens = sum_over_ranks(reports, self._device)
        self.garbage.collect()
        grad_norm, _ = trainer.optimizer.step()
        loss = (total / tokens).item()
        record.seconds.append(time.perf_counter() - began)
        record.cpu_s.append(time.process_time() - cpu)
        timeline = trainer.cad.pool.timeline
        served = timeline.take_serves()
        if timeline.times_waits:
            record.exposed_s.append(timeline.take_waits())
        record.attention_s.append(float(sum(sum(seconds) for seconds in served.values())))
        record.planned_s.append(float(step.balance.seconds_after[:, trainer.cad.pool_rank].sum()))
        record.loss.append(loss)
        record.grad_norm.append(grad_norm)
        record.plan_ms.append(step.planning_ms)
        record.wait_ms.append(step.waited_ms)
        copies = trainer.layers * trainer.config.parallel.tp
        record.bytes_moved.append(copies * step.balance.bytes_moved)
        record.rows.append(sum(batch.tokens.shape[1] for batch in step.batches))
        self._advance({"loss": loss, "tokens_per_s": step.plan.tokens / record.seconds[-1]})

    def _note_memory(self, record: RankRecord) -> None:
        pool = self._trainer.cad.pool.transport
        record.fallback_exchanges = getattr(pool, "fallback_exchanges", 0)
        config = self._trainer.config
        record.recompute, record.offload = config.train.recompute, config.train.offload
        record.backward, record.keep_outputs = config.cad.backward, config.train.keep_outputs
        if not self.on_gpu:
            return
        heap = self._trainer.receive_buffer_gib
        stages = predict_memory(config, self._trainer.world.size, self._trainer.vocabulary)
        record.predicted_gib = max(stage.total for stage in stages) / 2**30 + heap
        record.memory_gib = torch.cuda.max_memory_allocated(self._device) / 2**30 + heap
        record.reserved_gib = torch.cuda.max_memory_reserved(self._device) / 2**30 + heap
        record.outside_torch_gib = outside_torch(self._device) / 2**30 - heap


def give_back(world: World) -> None:
    """Give back what a mode or run held, so that the next one starts alike."""
    quantization.forget_layers()
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
