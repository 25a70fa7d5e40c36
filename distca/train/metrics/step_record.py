"""The figures of one step, gathered over ranks, and their means over a run."""

from __future__ import annotations

import numpy as np
import psutil
import torch

from distca.plan.metrics import imbalance
from distca.train.data.prefetch import StepInputs
from distca.train.metrics.flops import mfu, model_flops, peak_flops
from distca.train.metrics.phase_table import PhaseTable, measured_phases
from distca.train.metrics.progress import RunSummary
from distca.train.metrics.running_stats import RunningFigures
from distca.train.run.builder import Trainer
from distca.train.run.cost_correction import Learner, by_server, learns
from distca.train.run.memory import GIB, predict_memory

Values = dict[str, float | int | str | None]


class StepRecorder:
    """Collects what the step log, balance.png and the final table show.

    Args:
        trainer: what is trained.
        first_step: number of the first step that will be recorded.

    Attributes:
        before: [ranks] planned attention seconds of one layer with every document at home, summed over steps.
        after: [ranks] the same as planned.
        measured: [ranks] measured attention seconds, all layers, summed over steps.
        phases: attention by phase and rank, where there are pipeline stages.
        learner: what was learned so far.
    """

    def __init__(self, trainer: Trainer, first_step: int = 1) -> None:
        self._trainer = trainer
        self._first_step = first_step
        ranks = trainer.planning.pool_ranks
        self.before, self.after, self.measured = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
        self.phases = PhaseTable()
        self.learner = Learner(ranks, learns(trainer.config, trainer.world.device))
        self._figures = RunningFigures()
        self._layers = trainer.planning.layers.most
        on_gpu = trainer.world.device.type == "cuda"
        name = torch.cuda.get_device_name(trainer.world.device) if on_gpu else "cpu"
        self._peak = peak_flops(name, trainer.config.train.precision)
        predicted = predict_memory(trainer.config, trainer.world.size, trainer.vocabulary)
        self._predicted = [stage.total / GIB for stage in predicted]

    def record(
        self, inputs: StepInputs, loss: float, grad_norm: float, lr: float, seconds: float, waited_ms: float
    ) -> Values:
        """The metrics of a step, keyed as in distca.train.metrics.writer. Every rank calls it."""
        config, world = self._trainer.config, self._trainer.world
        measured, by_phase, memory = self._gather(len(inputs.batches))
        self.before = self.before + inputs.seconds_before.sum(axis=0)
        self.after = self.after + inputs.seconds_after.sum(axis=0)
        self.measured = self.measured + measured
        self.learner.learn_from(inputs, measured, by_phase)
        if by_phase is not None:
            self._add_phases(inputs, by_phase)
        tokens, beside = int(inputs.lengths.sum()), inputs.seconds_beside
        # 1F1B has phases too, which nobody planned.
        of_phases = 0.0 if inputs.pipeline is None else self._layers * beside
        flops = model_flops(config.model, self._trainer.vocabulary, inputs.lengths).total
        copies = self._layers * config.parallel.tp
        values: Values = {
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens": tokens,
            "step_s": seconds,
            "tokens_per_s": tokens / seconds,
            "mfu": mfu(flops, seconds, world.size, self._peak),
            "imbalance_before": _over_phases(inputs.seconds_before + beside),
            "imbalance_after": _over_phases(inputs.seconds_after + beside),
            "imbalance_measured": imbalance(measured + self._layers * beside.sum(axis=0)),
            "imbalance_phases": None if by_phase is None else _over_phases(by_phase + of_phases),
            "bytes_moved": copies * inputs.bytes_moved,
            "plan_ms": inputs.planning_ms,
            "plan_wait_ms": waited_ms,
        }
        if self.learner.current:
            learned = list(self.learner.current.values())
            speeds = np.stack([each.speeds for each in learned])
            values |= {"server_speed_min": float(speeds.min()), "server_speed_max": float(speeds.max())}
            values["reach_cost"] = float(np.mean([each.reach_cost for each in learned]))
        if world.device.type != "cuda":
            if config.log.memory:
                values["resident_memory_gb"] = float(max(memory))
        else:
            for key, peaks in (("peak_memory_gb", memory), ("predicted_memory_gb", self._predicted)):
                values[key] = float(max(peaks))
                if len(peaks) > 1:
                    values |= {f"{key}_stage_{stage}": float(peak) for stage, peak in enumerate(peaks)}
        self._figures.add(values)
        return values

    def summary(self, validation_loss: float | None) -> RunSummary:
        """Means over the recorded steps; the first, which compiles and warms up, does not count for speed."""
        figures = self._figures
        tokens, seconds = figures.mean("tokens", but_first=True), figures.mean("step_s", but_first=True)
        return RunSummary(
            steps=figures.steps,
            first_step=self._first_step,
            first_loss=figures.first("loss"),
            last_loss=figures.last("loss"),
            validation_loss=validation_loss,
            tokens_per_s=tokens / seconds if tokens and seconds else None,
            mfu=figures.mean("mfu", but_first=True),
            leveled="attention" if self._trainer.planning.beside is None else "attention, linear layers",
            imbalance_before=figures.mean("imbalance_before"),
            imbalance_after=figures.mean("imbalance_after"),
            imbalance_measured=figures.mean("imbalance_measured"),
            bytes_moved=figures.mean("bytes_moved"),
            plan_ms=figures.mean("plan_ms"),
            peak_memory_gb=figures.largest("peak_memory_gb"),
        )

    def _gather(self, micro_batches: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        """Measured attention seconds of this step by server: [ranks] and, with stages, [2 · phases, ranks]; and the
        largest memory of any rank of each stage, [stages] GiB."""
        trainer, planning = self._trainer, self._trainer.planning
        serves = trainer.pool.timeline.take_serves()
        phases = measured_phases(serves, planning, micro_batches) if planning.stages > 1 else None
        served = sum(sum(seconds) for seconds in serves.values())
        figures = by_server(planning, [served, _memory_gb(trainer.world.device), *(() if phases is None else phases)])
        memory = figures[:, 1].reshape(planning.stages, -1).max(axis=1)
        return figures[:, 0], None if phases is None else figures[:, 2:].T, memory

    def _add_phases(self, inputs: StepInputs, measured: np.ndarray) -> None:
        planned = inputs.pipeline is not None
        self.phases.add(
            measured,
            self._layers * inputs.seconds_before if planned else None,
            self._layers * inputs.seconds_after if planned else None,
            self._layers * inputs.seconds_beside if planned else None,
        )


def _over_phases(seconds: np.ndarray) -> float:
    """Slowest over mean, where every phase lasts as long as its slowest rank; 1 for no work at all."""
    mean = float(seconds.mean(axis=1).sum())
    return float(seconds.max(axis=1).sum()) / mean if mean > 0 else 1.0


def _memory_gb(device: torch.device) -> float:
    """Peak allocated device memory since the last call; on CPUs the process's resident memory now."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 2**30
    return float(psutil.Process().memory_info().rss) / 2**30
