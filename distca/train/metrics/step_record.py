"""The figures of one step, gathered over ranks, and their means over a run."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from distca.device.memory import outside_torch
from distca.plan.metrics import imbalance
from distca.plan.recurrent.traffic import recurrent_nanos
from distca.plan.step import StepBalance
from distca.train.metrics.expert_load import expert_values
from distca.train.metrics.flops import mfu, model_flops, peak_seconds
from distca.train.metrics.phase_table import PhaseTable, measured_phases
from distca.train.metrics.progress import SMOOTHED, RunSummary
from distca.train.metrics.running_means import RunningMeans
from distca.train.metrics.slow_ranks import STEPS, SlowRanks, speeds_as_measured
from distca.train.run.builder import Trainer
from distca.train.run.memory import GIB, predict_memory

if TYPE_CHECKING:
    from megatron_patches.steps.step import Step

logger = logging.getLogger(__name__)

Values = dict[str, float | int | str | list[float] | None]


class StepRecorder:
    """Collects what the step log, balance.png and the final table show.

    Args:
        trainer: what is trained.
        first_step: number of the first step that will be recorded.

    Attributes:
        leveled: what plans level, in words.
        parts: what planned time consists of: attention of each kind of layer, and linear layers where plans count them.
        before: [parts, ranks] planned time of what plans level, every document at home: in every step and phase the
            slowest rank first, relative to the mean, added up over steps. So the sum of before[:, 0], divided by the
            number of steps, is the mean of imbalance_before.
        after: [parts, ranks] the same as planned.
        measured: [ranks] the same from measured attention seconds of whole steps.
        phases: attention by phase and rank, where there are pipeline stages.
    """

    def __init__(self, trainer: Trainer, first_step: int = 1) -> None:
        self._trainer = trainer
        self._first_step = first_step
        options = trainer.cad.options
        kinds = [kind.name for kind in options.kinds]
        self.parts = [*kinds, "linear layers"] if options.non_attention else kinds
        ranks = options.pool_ranks
        self.before, self.after, self.measured = np.zeros((1, ranks)), np.zeros((1, ranks)), np.zeros(ranks)
        self.phases = PhaseTable(kinds)
        self.leveled = "attention" if options.non_attention is None else "attention and linear layers"
        self._means = RunningMeans()
        self._losses: list[float] = []
        self._layers = trainer.layers
        self._slow = SlowRanks()
        self._servers = self._servers_at_first = trainer.cad.servers
        self._places: list[str] = [""] * trainer.world.size
        dist.all_gather_object(self._places, f"{socket.gethostname()}, {trainer.world.device}")
        health = trainer.world.health
        self._server_places = [] if health is None else health.servers
        on_gpu = trainer.world.device.type == "cuda"
        self._device_name = torch.cuda.get_device_name(trainer.world.device) if on_gpu else "cpu"
        predicted = predict_memory(trainer.config, trainer.world.size, trainer.vocabulary)
        self._predicted = [stage.total / GIB for stage in predicted]

    def record(self, step: Step, loss: float, grad_norm: float, lr: float, seconds: float) -> Values:
        """The metrics of a step, keyed as in distca.train.metrics.writer. Every rank calls it."""
        config, world = self._trainer.config, self._trainer.world
        balance = step.balance
        by_rank = self._gather(len(step.batches), step)
        self._begin_anew_with(self._trainer.cad.servers)
        measured, by_phase, memory = self._by_server(by_rank)
        self._watch_speed(by_rank, balance)
        other = balance.other_seconds
        whole_step = measured + self._layers * other.sum(axis=0)
        self.before = _added(self.before, slowest_first(self._parts(balance.before_by_kind, other)))
        self.after = _added(self.after, slowest_first(self._parts(balance.after_by_kind, other)))
        self.measured = _added(self.measured, slowest_first(whole_step[None, None])[0])
        if by_phase is not None:
            self._add_phases(balance, by_phase)
        tokens = step.plan.tokens
        flops = model_flops(config.model, self._trainer.vocabulary, np.concatenate(step.plan.lengths))
        at_peak = peak_seconds(flops, self._device_name, config.train.precision, config.train.fp8)
        copies = self._layers * config.parallel.tp
        values: Values = {
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens": tokens,
            "step_s": seconds,
            "tokens_per_s": tokens / seconds,
            "mfu": mfu(at_peak, seconds, self._trainer.cad.device_count),
            "imbalance_before": _over_phases(balance.seconds_before + other),
            "imbalance_after": _over_phases(balance.seconds_after + other),
            "imbalance_measured": imbalance(whole_step),
            "imbalance_phases": None if by_phase is None else _over_phases(by_phase + self._layers * other),
            "bytes_moved": copies * balance.bytes_moved,
            "plan_ms": step.planning_ms,
            "plan_wait_ms": step.waited_ms,
            "attention_s": [round(float(seconds), 6) for seconds in by_rank[:, 1]],
        }
        values |= self._memory_values(memory, by_rank[world.size :, 2], float(by_rank[:, 3].max()))
        if config.model.recurrent_layers:
            values["recurrent_bytes_moved"] = self._recurrent_bytes(step)
        if config.model.experts.count:
            values |= expert_values(self._trainer.cad.expert_loads(self._trainer.model))
        self._means.add(values)
        self._losses.append(loss)
        return values

    def _recurrent_bytes(self, step: Step) -> int:
        """Bytes that all ranks sent for recurrent layers, by the layouts."""
        config = self._trainer.config
        tp, value = config.parallel.tp, 2 if config.train.precision == "bf16" else 4
        total = 0
        for symbol, layers in Counter(config.model.recurrent_layers).items():
            what = config.model.hybrid.recurrence(symbol, tp)
            halves = [half for layouts in step.plan.layouts for half in recurrent_nanos(layouts, what.halo_rows)]
            total += layers * tp * sum(half.travelling_bytes(what, value) for half in halves)
        return total

    def _parts(self, by_kind: np.ndarray, other: np.ndarray) -> np.ndarray:
        """[parts, phases, ranks] planned seconds, from those of attention by kind, and of linear layers."""
        return np.concatenate((by_kind, other[None]))[: len(self.parts)]

    def _memory_values(self, memory: np.ndarray, of_servers: np.ndarray, outside_torch: float) -> Values:
        """The memory of GPUs, or of CPU ranks where it is asked for.

        Args:
            memory: [stages] GiB of the fullest rank.
            of_servers: [servers] GiB of each server without a model.
            outside_torch: GiB of the rank that has most there.
        """
        on_gpu = self._trainer.world.device.type == "cuda"
        if not on_gpu and not self._trainer.config.log.memory:
            return {}
        values: Values = {}
        if len(of_servers):
            values[f"server_{'peak' if on_gpu else 'resident'}_memory_gb"] = float(max(of_servers))
        if not on_gpu:
            return values | {"resident_memory_gb": float(max(memory))}
        for key, peaks in (("peak_memory_gb", memory), ("predicted_memory_gb", self._predicted)):
            values[key] = float(max(peaks))
            if len(peaks) > 1:
                values |= {f"{key}_stage_{stage}": float(peak) for stage, peak in enumerate(peaks)}
        return values | {"outside_torch_gib": outside_torch}

    def summary(self, validation_loss: float | None) -> RunSummary:
        """Means over the recorded steps; the first, which compiles and warms up, does not count for speed."""
        means, smoothed = self._means, max(1, min(SMOOTHED, len(self._losses) // 2))
        tokens, seconds = means.mean("tokens", but_first=True), means.mean("step_s", but_first=True)
        return RunSummary(
            steps=means.steps,
            first_step=self._first_step,
            smoothed=smoothed,
            first_loss=float(np.mean(self._losses[:smoothed])) if self._losses else None,
            last_loss=float(np.mean(self._losses[-smoothed:])) if self._losses else None,
            validation_loss=validation_loss,
            tokens_per_s=tokens / seconds if tokens and seconds else None,
            mfu=means.mean("mfu", but_first=True),
            leveled=self.leveled,
            imbalance_before=means.mean("imbalance_before"),
            imbalance_after=means.mean("imbalance_after"),
            imbalance_measured=means.mean("imbalance_measured"),
            bytes_moved=means.mean("bytes_moved"),
            plan_ms=means.mean("plan_ms"),
            peak_memory_gb=means.largest("peak_memory_gb"),
            slowest=self._slowest(),
        )

    def _slowest(self) -> str | None:
        """The slowest rank, in words; None where speeds are unknown."""
        slower = self._slow.slower
        if slower is None or np.isnan(slower).all() or self._trainer.world.device.type != "cuda":
            return None
        rank = int(np.nanargmax(slower))
        return f"{self._who(rank)}, {slower[rank]:+.1%} time against the others"

    def _who(self, rank: int) -> str:
        homes = self._trainer.world.size
        if rank < homes:
            return f"Rank {rank} ({self._places[rank]})"
        number = self._servers[rank - homes]
        where = self._server_places[number] if number < len(self._server_places) else "come since"
        return f"Server {number} ({where})"

    def _begin_anew_with(self, servers: tuple[int, ...]) -> None:
        """Forget what is kept by place in the pool, where that has changed."""
        if servers != self._servers:
            self._servers, self._slow, self.phases = servers, SlowRanks(), PhaseTable(self.phases.kinds)

    def _gather(self, micro_batches: int, step: Step) -> np.ndarray:
        """Gathers the figures of every rank of the world, then of servers: [world + servers, 4 + 2 · phases] float64.

        They are its rank in the server pool, attention seconds of this step, GiB of memory, and GiB outside torch. With
        stages attention seconds by phase follow."""
        cad = self._trainer.cad
        serves, stages = cad.pool.timeline.take_serves(), cad.options.stages
        phases = measured_phases(serves, cad.stage, cad.options, micro_batches) if stages > 1 else None
        served = sum(sum(seconds) for seconds in serves.values())
        mine = [cad.pool_rank, served, *self._memory(), *(() if phases is None else phases)]
        row = torch.tensor(mine, dtype=torch.float64)
        everyone = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, row)
        found = torch.stack(everyone).numpy()
        if not self._trainer.config.cad.servers:
            return found
        return np.concatenate((found, self._of_servers(step, found.shape[1])))

    def _of_servers(self, step: Step, columns: int) -> np.ndarray:
        """The same of servers without a model; every home calls it."""
        cad, tp = self._trainer.cad, self._trainer.config.parallel.tp
        found: list[Any] = [cad.served(step)]
        dist.broadcast_object_list(found)
        rows = np.zeros((len(found[0]), columns))
        for number, (served, row) in enumerate(zip(found[0], rows, strict=True)):
            row[0] = cad.options.homes + number // tp
            if served is None:
                continue
            row[1], row[2] = sum(map(sum, served.seconds.values())), served.peak / GIB
            if (
                columns > 4
                and (phases := measured_phases(served.seconds, 0, cad.options, len(step.batches))) is not None
            ):
                row[4:] = phases
        return rows

    def _by_server(self, by_rank: np.ndarray) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        """Measured attention seconds of a step by server: [ranks] and, with stages, [2 · phases, ranks]; and the
        largest memory of any rank of each stage, [stages] GiB."""
        options = self._trainer.cad.options
        gathered = by_server(options.pool_ranks, by_rank)
        memory = gathered[: options.homes, 1].reshape(options.stages, -1).max(axis=1)
        return gathered[:, 0], gathered[:, 3:].T if gathered.shape[1] > 3 else None, memory

    def _memory(self) -> tuple[float, float]:
        """GiB: peak of allocated device memory since the last call, and what lies outside torch now, NVSHMEM's receive
        buffer aside; on CPUs the process's resident memory now, and none."""
        device = self._trainer.world.device
        if device.type != "cuda":
            return float(psutil.Process().memory_info().rss) / GIB, 0.0
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / GIB, outside_torch(device) / GIB - self._trainer.receive_buffer_gib

    def _watch_speed(self, by_rank: np.ndarray, balance: StepBalance) -> None:
        """Name GPUs that are slower than the others; ranks on CPUs share their cores with whatever else runs there."""
        planned = balance.seconds_after.sum(axis=0)[by_rank[:, 0].astype(int)]
        named = self._slow.add(by_rank[:, 1], planned)
        if not named or self._trainer.world.device.type != "cuda" or self._trainer.world.rank:
            return
        assert self._slow.slower is not None
        for rank in named:
            logger.warning(
                "%s took %.0f %% longer than the others for the attention that it was given, over %d "
                "steps: all others wait for it. Look at its clocks and temperature, and at what else runs there.",
                *(self._who(rank), 100 * self._slow.slower[rank], STEPS),
            )
        cad, pool = self._trainer.config.cad, balance.seconds_after.shape[1]
        # Speeds are given by place in the pool. They fit the next start only if no server has gone or come.
        if cad.enabled and len(cad.speeds) in (0, pool) and self._servers == self._servers_at_first:
            places = by_rank[:, 0].astype(int).tolist()
            found = speeds_as_measured(cad.speeds or (1.0,) * pool, places, self._slow.slower, sorted(self._slow.named))
            logger.warning(
                "Plans count with its speed if the run is started again with --cad.speeds '[%s]'.",
                ",".join(f"{speed:g}" for speed in found),
            )

    def _add_phases(self, balance: StepBalance, measured: np.ndarray) -> None:
        planned = self._trainer.config.cad.enabled
        self.phases.add(
            measured,
            self._layers * balance.seconds_before if planned else None,
            self._layers * balance.seconds_after if planned else None,
            self._layers * balance.other_seconds if planned else None,
            self._layers * balance.after_by_kind if planned else None,
        )


def by_server(servers: int, by_rank: np.ndarray) -> np.ndarray:
    """Figures of ranks as those of servers.

    Args:
        servers: of the pool.
        by_rank: [world, 1 + K]: of every rank, its server and K figures.

    Returns:
        [servers, K] float64. A server's tensor-parallel ranks compute the same tasks for other heads: the largest
        counts.
    """
    gathered = np.zeros((servers, by_rank.shape[1] - 1))
    np.maximum.at(gathered, by_rank[:, 0].astype(int), by_rank[:, 1:])
    return gathered


def slowest_first(seconds: np.ndarray) -> np.ndarray:
    """[parts, ranks] seconds of every phase's slowest rank, of the next and so on, added up and relative to the mean.

    Args:
        seconds: [parts, phases, ranks], whose parts together are a rank's time.
    """
    together = seconds.sum(axis=0)
    mean = float(together.mean(axis=1).sum())
    if not mean > 0:
        return np.full((len(seconds), seconds.shape[2]), 1 / len(seconds))
    order = np.argsort(-together, axis=1, kind="stable")
    return np.asarray(np.take_along_axis(seconds, order[None], axis=2).sum(axis=1) / mean)


def _added(total: np.ndarray, more: np.ndarray) -> np.ndarray:
    """The sum [..., ranks] of figures of pools that may have other numbers of ranks: those that lack are 0."""
    ranks = max(total.shape[-1], more.shape[-1])
    one, other = (np.pad(each, [(0, 0)] * (each.ndim - 1) + [(0, ranks - each.shape[-1])]) for each in (total, more))
    return np.asarray(one + other)


def _over_phases(seconds: np.ndarray) -> float:
    """Slowest over mean, where every phase lasts as long as its slowest rank; 1 for no work at all."""
    return float(slowest_first(seconds[None])[0, 0])
