"""One mode of a peer on one workload: build, warm up, measure, trace, free. As benchmarks.throughput.measure."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from benchmarks.peers.model import Peer, build_peer
from benchmarks.peers.planning import PlanningTime
from benchmarks.peers.rows import Rows, packed_rows
from benchmarks.throughput.batches import Batches
from benchmarks.throughput.busy import trace
from benchmarks.throughput.gpu_state import GpuState
from benchmarks.throughput.record import RankRecord, of_all_ranks
from benchmarks.throughput.settings import Cell, Settings
from distca.baselines import Mode, Work, groups_of
from distca.cluster.world import World
from distca.data.sampler import MicroBatch
from distca.device.memory import outside_torch
from distca.train.run.garbage import SteadyGarbage

_FP8_ROWS = 16
"""Rows of a product in FP8 are a multiple of it."""
_planning: PlanningTime | None = None


@dataclass(frozen=True)
class Batch:
    """One rank's rows of a micro-batch, on its device; [1, N] each, as :class:`~benchmarks.peers.rows.Rows` says."""

    tokens: torch.Tensor
    labels: torch.Tensor
    learned: torch.Tensor
    positions: torch.Tensor
    packed: PackedSeqParams | None


def measure_peer(
    mode: Mode,
    settings: Settings,
    cell: Cell,
    world: World,
    batches: Batches,
    work: Work,
    advance: Callable[[dict[str, Any]], None],
) -> list[RankRecord]:
    """Train on all batches; returns every rank's record, on every rank. Every rank calls it together.

    Args:
        mode: a peer's.
        settings: of the run.
        cell: the workload.
        world: this process's place.
        batches: its global batches.
        work: what documents cost, for dealing them to context-parallel groups.
        advance: called after every step with its figures.

    Raises:
        BaselineError: the settings ask for something that is not built here.
    """
    global _planning
    peer = build_peer(settings.config, mode, world.device.type == "cuda")
    _planning = _planning or PlanningTime()
    run = _Run(peer, mode, settings, world, batches, work, _planning, advance)
    with SteadyGarbage() as garbage, ThreadPoolExecutor(1) as reader:
        run.garbage, run.reader = garbage, reader
        record = run.measured()
    del run, peer
    _forget_layers()
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return of_all_ranks(record, world.size)


def _forget_layers() -> None:
    """Let Transformer Engine forget the scales of layers that are gone."""
    if quantization := sys.modules.get("transformer_engine.pytorch.quantization"):
        quantization.FP8GlobalStateManager.reset()


class _Run:
    def __init__(
        self,
        peer: Peer,
        mode: Mode,
        settings: Settings,
        world: World,
        batches: Batches,
        work: Work,
        planning: PlanningTime,
        advance: Callable[[dict[str, Any]], None],
    ) -> None:
        self._peer, self._mode, self._settings, self._world = peer, mode, settings, world
        self._batches, self._work, self._planning, self._advance = batches, work, planning, advance
        config = settings.config
        self._ranks = config.parallel.data_parallel(world.size)
        self._align = (_FP8_ROWS if config.train.fp8 != "none" else 1) * (config.parallel.tp)
        self._on_gpu = world.device.type == "cuda"
        self._first = self._on_gpu and config.optimizer.distributed
        self.garbage = SteadyGarbage()
        self.reader: ThreadPoolExecutor

    def measured(self) -> RankRecord:
        settings, record = self._settings, RankRecord()
        self._steps(0, settings.warm_up, RankRecord())
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        watches = self._on_gpu and self._world.rank == 0
        with GpuState() if watches else nullcontext() as state:
            self._steps(settings.warm_up, settings.batches, record)
        if state is not None:
            record.gpus = state.summaries(torch.cuda.device_count())
        record.recompute = settings.config.train.recompute
        if self._on_gpu:
            device = self._world.device
            record.memory_gib = torch.cuda.max_memory_allocated(device) / 2**30
            record.reserved_gib = torch.cuda.max_memory_reserved(device) / 2**30
            record.outside_torch_gib = outside_torch(device) / 2**30
            if settings.traced:
                record.traced = trace(partial(self._steps, settings.warm_up, settings.traced, RankRecord()))
        return record

    def _steps(self, first: int, count: int, record: RankRecord) -> None:
        """Steps from global batch ``first`` on. The next one's tokens are read while one runs, as in other modes."""
        chosen = list(islice(cycle(self._batches.global_batches), first, first + count))
        ahead = [self.reader.submit(self._read, each) for each in chosen[:1]]
        for number in range(count):
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            rows, read_ms = ahead.pop().result()
            waited_ms = (time.perf_counter() - began) * 1e3
            if number + 1 < count:
                ahead.append(self.reader.submit(self._read, chosen[number + 1]))
            loss, grad_norm = self._step([self._on_device(each) for each in rows])
            record.seconds.append(time.perf_counter() - began)
            record.cpu_s.append(time.process_time() - cpu)
            record.loss.append(loss)
            record.grad_norm.append(grad_norm)
            record.plan_ms.append(read_ms)
            record.wait_ms.append(waited_ms)
            record.kernel_planning_s.append(self._planning.take())
            record.bytes_moved.append(0)
            record.rows.append(sum(len(each.tokens) for each in rows))
            tokens = sum(each.tokens for each in chosen[number])
            self._advance({"loss": loss, "tokens_per_s": tokens / record.seconds[-1]})

    def _step(self, batches: list[Batch]) -> tuple[float, float]:
        """Forward, backward and update, in Megatron's order; the loss per token and the gradient's norm."""
        peer, first = self._peer, self._first
        peer.model.zero_grad_buffer()
        peer.optimizer.zero_grad()
        if first:  # weights are as they were drawn: none is to be gathered
            peer.model.disable_forward_pre_hook(param_sync=False)
        reports = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter(batches),
            model=peer.model,
            num_microbatches=len(batches),
            seq_length=batches[0].tokens.shape[1] * self._mode.degree,
            micro_batch_size=1,
            forward_only=False,
        )
        if first:
            peer.model.enable_forward_pre_hook()
            self._first = False
        total = self._over_ranks(reports)
        self.garbage.collect()
        _, grad_norm, _ = peer.optimizer.step()
        peer.schedule.step(increment=1)
        return float((total[0] / total[1]).item()), float(grad_norm)

    def _over_ranks(self, reports: Sequence[torch.Tensor]) -> torch.Tensor:
        """[summed loss, learned tokens] of the global batch, float64 on the device."""
        total = torch.zeros(2, dtype=torch.float64, device=self._world.device)
        for report in reports:  # none on stages without the loss
            total += report
        dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return total

    def _read(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[Rows], float]:
        """This rank's rows of a global batch, and the milliseconds that reading took."""
        began = time.perf_counter()
        rows = [each for micro_batch in micro_batches for each in self._rows(micro_batch)]
        return rows, (time.perf_counter() - began) * 1e3

    def _rows(self, micro_batch: MicroBatch) -> list[Rows]:
        assert micro_batch.rank_of is not None
        mode, room = self._mode, self._settings.config.data.tokens_per_rank
        group_of = groups_of(
            mode, micro_batch.lengths, micro_batch.rank_of, self._batches.bins, self._ranks, room, self._work
        )
        group = parallel_state.get_data_parallel_rank()
        documents = self._batches.documents.choose(micro_batch.documents[np.flatnonzero(group_of == group)])
        rank = parallel_state.get_context_parallel_rank()
        if not self._on_gpu:  # Megatron's local layers take no packed documents
            rows = [packed_rows([each], 1, 0, self._align) for each in documents]
            # Ranks that share experts take equally many steps.
            most = int(np.bincount(group_of).max()) if self._settings.config.parallel.ep > 1 else 0
            return rows + [packed_rows([], 1, 0, self._align)] * (most - len(rows))
        return [packed_rows(documents, mode.degree, rank, self._align)]

    def _on_device(self, rows: Rows) -> Batch:
        columns = (rows.tokens, rows.labels, rows.learned, rows.positions)
        tokens, labels, learned, positions = (self._sent(each)[None] for each in columns)
        return Batch(tokens, labels, learned, positions, self._packed(rows) if self._on_gpu else None)

    def _packed(self, rows: Rows) -> PackedSeqParams:
        """Padding counts as a part of its document, so that there is none between documents."""
        borders = self._sent(rows.borders)
        known = {each.name for each in fields(PackedSeqParams)}
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=borders,
            cu_seqlens_kv=borders,
            cu_seqlens_q_padded=borders,
            cu_seqlens_kv_padded=borders,
            max_seqlen_q=rows.longest,
            max_seqlen_kv=rows.longest,
            **({"pad_between_seqs": False} if "pad_between_seqs" in known else {}),
        )

    def _sent(self, column: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(column)
        return tensor.pin_memory().to(self._world.device, non_blocking=True) if self._on_gpu else tensor


def _forward_step(batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    output = model(batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=batch.packed)
    return output, partial(_summed, batch.learned)


def _summed(learned: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The results that Megatron's schedules ask of a micro-batch: the summed loss, its tokens, and both for the log."""
    total, tokens = (losses.float() * learned).sum(), learned.sum()
    return total, tokens.int(), torch.stack((total.detach().double(), tokens.double()))
