"""The training loop: steps, validation, checkpoints, and everything a person looks at afterwards."""

from __future__ import annotations

import logging
import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from distca.data.corpus import Corpus
from distca.errors import DivergedError
from distca.train.checkpoint import checkpoints
from distca.train.config.schema import RunConfig
from distca.train.data.corpus import open_sampler
from distca.train.data.prefetch import Ahead, StepInputs, make_step_inputs
from distca.train.metrics.phase_plot import plot_phases
from distca.train.metrics.plots import plot_balance, write_timeline
from distca.train.metrics.progress import StepProgress, print_summary
from distca.train.metrics.step_record import StepRecorder
from distca.train.metrics.writer import MetricsWriter
from distca.train.run.builder import Trainer
from distca.train.run.consistency import Agreement
from distca.train.run.gc_control import SteadyGarbage
from distca.train.run.run_folder import Checkpoint, RunFolder

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

logger = logging.getLogger(__name__)


def train(trainer: Trainer, corpus: Corpus, folder: RunFolder, resume: Checkpoint | None) -> None:
    """Run all steps; every rank calls it.

    Args:
        trainer: what is trained.
        corpus: the documents.
        folder: where rank 0 writes.
        resume: the checkpoint to go on from.
    """
    _Loop(trainer, corpus, folder, resume).run()


class _Loop:
    def __init__(self, trainer: Trainer, corpus: Corpus, folder: RunFolder, resume: Checkpoint | None) -> None:
        self._trainer, self._corpus, self._folder = trainer, corpus, folder
        self._config = trainer.config
        self._first = resume.step if resume else 0
        self._sampler = open_sampler(self._config, corpus.train, trainer.planning.ranks)
        self._sampler_state = self._sampler.state_dict()
        if resume:
            self._sampler_state = checkpoints.load(trainer, resume)
            self._sampler.load_state_dict(self._sampler_state)
        self._recorder = StepRecorder(trainer, self._first + 1)
        self._drawn: list[Path] = []
        self._garbage = SteadyGarbage()
        self._agreement = Agreement(self._first)
        self._ahead = Ahead(self._make_inputs, trainer.world.device)
        self._speaks = trainer.world.rank == 0
        self._metrics: MetricsWriter | None = None
        self._progress: StepProgress | None = None

    def run(self) -> None:
        """All steps, then validation, the last checkpoint and the summary."""
        steps, log = self._config.train.steps, self._config.log
        if log.timeline_steps and log.timeline_steps[0] > steps:
            logger.info("No timeline: log.timeline_steps %s begins after the last step, %d.", log.timeline_steps, steps)
        validation = None
        with ExitStack() as stack:
            if self._speaks:
                resumed_at = self._first + 1 if self._first else None
                self._metrics = stack.enter_context(MetricsWriter(self._folder.path, log.tensorboard, resumed_at))
                self._progress = stack.enter_context(StepProgress(steps, done=self._first, every=log.every))
            stack.callback(self._ahead.close)
            stack.enter_context(self._garbage)
            for step in range(self._first + 1, steps + 1):
                if self._trainer.world.companions is not None:
                    self._trainer.world.companions.doing(f"step {step}")
                self._record_timeline(step)
                values = self._step(step)
                self._end_timeline(step)
                validate_every = self._config.train.validate_every
                if step == steps or (validate_every and step % validate_every == 0):
                    validation = values["validation_loss"] = self._validate()
                self._show(step, values)
                save_every = self._config.checkpoint.save_every
                if (step == steps and self._config.checkpoint.save_at_end) or (save_every and step % save_every == 0):
                    checkpoints.save(self._trainer, self._folder, step, self._sampler_state)
        if self._speaks:
            self._draw()
            print_summary(self._recorder.summary(validation), self._folder, self._drawn)

    def _run(self, inputs: StepInputs, forward_only: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum of losses, target tokens) of a global batch."""
        from megatron_patches.pipeline_schedule import run_ticks
        from megatron_patches.training_step import run_micro_batches

        trainer, model = self._trainer, cast("DistributedDataParallel", self._trainer.model)
        if inputs.pipeline is None:
            return run_micro_batches(model, inputs.batches, forward_only=forward_only)
        plan, routes = inputs.pipeline.plan, inputs.pipeline.routes
        return run_ticks(model, inputs.batches, plan, routes, trainer.pool, forward_only=forward_only)

    def _make_inputs(self, **how: Any) -> StepInputs:
        """The next step's, in the thread that plans; refused if another rank planned it differently."""
        inputs = make_step_inputs(self._trainer.planning, self._corpus.train, self._sampler, **how)
        self._agreement.check(inputs.fingerprint)
        return inputs

    def _step(self, step: int) -> dict[str, Any]:
        began = time.perf_counter()
        if self._trainer.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # validation and checkpoints do not count as this step's
        inputs, waited_ms = self._ahead.take()
        loss_sum, tokens = self._run(inputs)
        if step < self._config.train.steps:
            # Now, while this thread only waits for the GPU: Python's lock would keep it from queueing kernels.
            self._ahead.start(learned=self._recorder.learner.current)
        self._garbage.collect()  # while the GPU is busy with the backward pass
        grad_norm, lr = self._trainer.optimizer.step()  # type: ignore[attr-defined]
        loss = (loss_sum / tokens.clamp(min=1)).item()  # there may be no target among them
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise _diverged(step, loss, grad_norm, self._config)
        self._sampler_state = inputs.sampler_state
        seconds = time.perf_counter() - began
        return self._recorder.record(inputs, loss, grad_norm, lr, seconds, waited_ms)

    def _validate(self) -> float | None:
        """Mean loss per target token over the first global batches of the validation set; the same ones every time."""
        if not len(self._corpus.validation):
            return None
        trainer = self._trainer
        sampler = open_sampler(self._config, self._corpus.validation, trainer.planning.ranks)
        total = torch.zeros(2, dtype=torch.float64, device=trainer.world.device)
        trainer.model.eval()  # type: ignore[attr-defined]
        for _ in range(self._config.train.validate_batches):
            inputs: StepInputs = make_step_inputs(trainer.planning, self._corpus.validation, sampler)
            total += torch.stack(self._run(inputs, forward_only=True))
        trainer.model.train()  # type: ignore[attr-defined]
        trainer.pool.timeline.serve_seconds()  # validation does not count as the next step's attention
        return float(total[0] / total[1])

    def _show(self, step: int, values: dict[str, Any]) -> None:
        if self._metrics is not None and self._progress is not None:
            self._metrics.log(step, values)
            self._progress.update(step, values)

    def _record_timeline(self, step: int) -> None:
        """Start recording before the first of log.timeline_steps that this run does."""
        wanted = self._config.log.timeline_steps
        if wanted is not None and step == max(wanted[0], self._first + 1) and step <= wanted[1]:
            self._trainer.pool.timeline.start_recording()

    def _end_timeline(self, step: int) -> None:
        """Write the file right after the last of log.timeline_steps that this run does, before it validates."""
        wanted = self._config.log.timeline_steps
        last = None if wanted is None else min(wanted[1], self._config.train.steps)
        if step == last and self._trainer.pool.timeline.recording:
            self._write_timeline()

    def _write_timeline(self) -> None:
        world = self._trainer.world
        mine = self._trainer.pool.timeline.take(world.rank)
        gathered: list[Any] = [None] * world.size
        dist.gather_object(mine, gathered if self._speaks else None)
        if self._speaks:
            write_timeline(self._folder.timeline, [event for events in gathered for event in events])
            self._drawn.append(self._folder.timeline)

    def _draw(self) -> None:
        """balance.png, and with stages phases.json and phases.png: each series against its own mean, as the plan
        counts one layer and the clock all of them."""
        recorder = self._recorder
        before, after, measured = (
            seconds / seconds.mean() if seconds.sum() > 0 else None
            for seconds in (recorder.before, recorder.after, recorder.measured)
        )
        if before is not None and after is not None and measured is not None:
            planned = after if self._config.cad.enabled else None
            plot_balance(self._folder.balance_plot, before, planned, measured, unit="1 = mean")
            self._drawn.append(self._folder.balance_plot)
        phases, stages = recorder.phases, self._trainer.planning.stages
        if phases.steps:
            phases.write(self._folder.phases, stages)
            plot_phases(self._folder.phases_plot, phases, stages)
            self._drawn.append(self._folder.phases_plot)


def _diverged(step: int, loss: float, grad_norm: float, config: RunConfig) -> DivergedError:
    optimizer = config.optimizer
    return DivergedError(
        f"Step {step} has loss {loss:g} and gradient norm {grad_norm:g}, with optimizer.lr {optimizer.lr:g}, "
        f"optimizer.clip_grad {optimizer.clip_grad:g} and optimizer.warmup_steps {config.resolved_warmup_steps}; "
        "what follows could only be worse, so the run ends here."
    )
