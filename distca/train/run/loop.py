"""The training loop: steps, validation, checkpoints, and everything a person looks at afterwards."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from distca.data.corpus import Corpus
from distca.errors import ConfigError, DivergedError
from distca.train.checkpoint import checkpoints
from distca.train.checkpoint.export import export
from distca.train.checkpoint.saver import Saver
from distca.train.config.names import settings_named
from distca.train.config.schema import LogConfig, RunConfig
from distca.train.data.corpus import dealt, open_sampler
from distca.train.metrics.files import warned_of
from distca.train.metrics.plots import plot_balance, plot_phases, write_timeline
from distca.train.metrics.progress import StepProgress, perplexity, print_summary
from distca.train.metrics.step_record import StepRecorder
from distca.train.metrics.writer import MetricsWriter, read_metrics
from distca.train.run.builder import Trainer
from distca.train.run.garbage import SteadyGarbage
from distca.train.run.profiler import ProfilerWindow
from distca.train.run.run_folder import Checkpoint, RunFolder
from distca.train.run.stopping import Decision, Stopping, say_finished
from distca.words import count

if TYPE_CHECKING:
    from megatron_patches.steps.step import Step

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


def evaluate(trainer: Trainer, corpus: Corpus, folder: RunFolder, resume: Checkpoint | None) -> None:
    """Compute and log the validation loss, and train nothing; every rank calls it with what :func:`train` takes. The
    documents need not be those of the run that saved ``resume``."""
    if not len(corpus.validation):
        corpus.validation = corpus.train
    loss, targets = _Loop(trainer, corpus, folder, resume).loss_of_validation()
    if not targets:
        raise ConfigError(
            f"train.validate_batches is {trainer.config.train.validate_batches}, and these batches have no token whose "
            "loss counts; raise it, or name other documents."
        )
    logger.info(
        "Validation loss %.4f, perplexity %.4g, over %s (train.validate_batches %d).",
        *(loss, perplexity(loss), count(targets, "target token"), trainer.config.train.validate_batches),
    )
    if trainer.world.rank == 0:
        say_finished()


def export_only(trainer: Trainer, corpus: Corpus, folder: RunFolder, resume: Checkpoint | None) -> None:
    """Write the weights of a checkpoint as the folder in checkpoint.export; every rank calls it with what
    :func:`train` takes."""
    _Loop(trainer, corpus, folder, resume).export()


class _Loop:
    def __init__(self, trainer: Trainer, corpus: Corpus, folder: RunFolder, resume: Checkpoint | None) -> None:
        self._trainer, self._corpus, self._folder = trainer, corpus, folder
        self._config = trainer.config
        self._first = resume.step if resume else 0
        self._sampler = open_sampler(self._config, corpus.train, trainer.cad.options.ranks)
        self._sampler_state = self._sampler.state_dict()
        if resume:
            self._sampler_state = checkpoints.load(trainer, resume)
            if not self._config.train.evaluate:
                self._sampler.load_state_dict(self._sampler_state)
        self._recorder = StepRecorder(trainer, self._first + 1)
        self._saver = Saver(trainer, folder)
        self._profiler = ProfilerWindow(self._config.log.profile_steps, folder.profile, trainer.world.rank)
        self._drawn: list[Path] = []
        self._seen = 0
        self._garbage = SteadyGarbage()
        self._speaks = trainer.world.rank == 0
        self._metrics: MetricsWriter | None = None
        self._progress: StepProgress | None = None

    def run(self) -> None:
        """All steps, then validation, the last checkpoint and the summary."""
        steps, log = self._config.train.steps, self._config.log
        self._stopping = Stopping(self._config, self._trainer.world)
        for sentence in _not_recorded(log, self._first + 1, steps):
            logger.info("%s", sentence)
        validation = exported = None
        with ExitStack() as stack:
            ahead = self._enter(stack)
            for step in range(self._first + 1, steps + 1):
                values, decided = self._observed_step(step, ahead)
                if self._validates(step):
                    if self._progress is not None:
                        self._progress.validating(step)
                    validation = values["validation_loss"] = self.validate()
                self._show(step, values)
                self._save(step, decided)
                if decided.stop and step < steps:
                    if self._speaks:
                        logger.warning(
                            "Ended by %s after step %d of %d; RESUME=auto (checkpoint.resume auto) goes on from there.",
                            *(decided.stop, step, steps),
                        )
                    break
            else:
                if exported := self._config.checkpoint.export:
                    self.export()
                if self._speaks:
                    say_finished()
            self._write_timeline()  # of a run that stopped while it was recorded
            self._profiler.finish()
            self._saver.finish()
            self._saver.close()
        if self._speaks:
            with warned_of(self._folder.path):
                self._draw()
            left_out = tuple(map(str, self._corpus.left_out))
            summary = self._recorder.summary(validation)
            summary = replace(summary, left_out=left_out, exported=exported)
            print_summary(summary, self._folder, self._drawn)

    def export(self) -> None:
        """Write the folder in checkpoint.export."""
        export(self._trainer, Path(str(self._config.checkpoint.export)))

    def _enter(self, stack: ExitStack) -> Iterator[Step]:
        """Open what is closed when the run ends, however it does; the steps, planned ahead."""
        steps, log = self._config.train.steps, self._config.log
        if self._speaks:
            resumed_at = self._first + 1 if self._first else None
            self._metrics = stack.enter_context(
                MetricsWriter(self._folder.path, log.tensorboard, resumed_at, log.wandb)
            )
            self._seen = sum(line.get("tokens_seen", 0) for line in read_metrics(self._folder.path)[-1:])
            leveled = self._recorder.leveled
            self._progress = stack.enter_context(
                StepProgress(steps, done=self._first, every=log.every, leveled=leveled)
            )
        stack.enter_context(self._garbage)
        documents = dealt(self._corpus.train, self._sampler, steps - self._first, self._config.train.loss)
        ahead = stack.enter_context(closing(self._trainer.cad.plan_ahead(documents, self._first + 1)))
        health = self._trainer.world.health
        if health is not None:  # entered last: what is closed above may wait for other ranks
            stack.enter_context(health.ends_failures())
            stack.enter_context(settings_named())
        return ahead

    def _observed_step(self, step: int, ahead: Iterator[Step]) -> tuple[dict[str, Any], Decision]:
        """Its metrics, and what all ranks do after it; timeline and profile are taken as the settings say."""
        if self._trainer.world.health is not None:
            self._trainer.world.health.doing(f"step {step}")
        self._record_timeline(step)
        self._profiler.before(step)
        self._stopping.ask(self._saver.has_failed)
        with self._trainer.cad.pool.timeline.stage(f"step {step}", track="steps"):
            values = self._step(step, ahead)
        decided = self._stopping.decide()
        self._end_timeline(step)
        self._profiler.after(step)
        return values, decided

    def _validates(self, step: int) -> bool:
        every = self._config.train.validate_every
        return step == self._config.train.steps or bool(every and step % every == 0)

    def _save(self, step: int, decided: Decision) -> None:
        """Write the checkpoint that is due after a step, if one is."""
        if decided.failed:
            self._saver.finish()
        if self._saves(step, decided):
            last = bool(decided.stop) or step == self._config.train.steps
            self._saver.save(step, self._sampler_state, wait=last)
            self._stopping.saved()

    def _saves(self, step: int, decided: Decision) -> bool:
        checkpoint = self._config.checkpoint
        if step == self._config.train.steps and checkpoint.save_at_end:
            return True
        return decided.save or bool(decided.stop) or bool(checkpoint.save_every and step % checkpoint.save_every == 0)

    def _run(self, step: Step, forward_only: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum of losses, target tokens) of a global batch."""
        from megatron_patches.training.training_step import sum_over_ranks, summed_loss_step

        trainer = self._trainer
        reports = trainer.cad.forward_backward(step, summed_loss_step, trainer.model, forward_only=forward_only)
        return sum_over_ranks(reports, trainer.world.device)

    def _step(self, number: int, ahead: Iterator[Step]) -> dict[str, Any]:
        began = time.perf_counter()
        if self._trainer.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # validation and checkpoints do not count as this step's
        step = next(ahead)
        loss_sum, tokens = self._run(step)
        step = self._trainer.cad.as_run(step)
        self._garbage.collect()  # while the GPU is busy with the backward pass
        self._saver.before_update()
        grad_norm, lr = self._trainer.optimizer.step()
        loss = (loss_sum / tokens.clamp(min=1)).item()  # there may be no target among them
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise _diverged(number, loss, grad_norm, self._config)
        self._sampler_state = step.documents.note
        return self._recorder.record(step, loss, grad_norm, lr, time.perf_counter() - began)

    def validate(self) -> float | None:
        """Mean loss per target token over the first global batches of the validation set; the same ones every time.

        None if there is no validation set, or if these batches have no target token."""
        if not len(self._corpus.validation):
            return None
        loss, targets = self.loss_of_validation()
        if not targets and self._speaks:
            logger.warning(
                "There is no validation loss: train.validate_batches is %d, and these batches have no token whose loss "
                "counts. Raise it, or data.validation_fraction.",
                self._config.train.validate_batches,
            )
        return loss if targets else None

    def loss_of_validation(self) -> tuple[float, int]:
        """The loss of a set that has documents, and of how many target tokens it is the mean; NaN of none."""
        trainer = self._trainer
        sampler = open_sampler(self._config, self._corpus.validation, trainer.cad.options.ranks)
        total = torch.zeros(2, dtype=torch.float64, device=trainer.world.device)
        trainer.model.eval()
        for documents in dealt(self._corpus.validation, sampler, self._config.train.validate_batches):
            total += torch.stack(self._run(trainer.cad.plan_step(documents), forward_only=True))
        trainer.model.train()
        trainer.cad.pool.timeline.serve_seconds()  # validation does not count as the next step's attention
        return float(total[0] / total[1]), int(total[1])

    def _show(self, step: int, values: dict[str, Any]) -> None:
        if self._metrics is not None and self._progress is not None:
            self._seen += values["tokens"]
            values["tokens_seen"] = self._seen
            self._metrics.log(step, values)
            self._progress.update(step, values)

    def _record_timeline(self, step: int) -> None:
        """Start recording before the first of log.timeline_steps that this run does."""
        wanted = self._config.log.timeline_steps
        if wanted is not None and step == max(wanted[0], self._first + 1) and step <= wanted[1]:
            self._trainer.cad.pool.timeline.start_recording()

    def _end_timeline(self, step: int) -> None:
        """Write the file right after the last of log.timeline_steps that this run does, before it validates."""
        wanted = self._config.log.timeline_steps
        last = None if wanted is None else min(wanted[1], self._config.train.steps)
        if step == last:
            self._write_timeline()

    def _write_timeline(self) -> None:
        """Writes the timeline of all ranks, if one is being recorded."""
        if not self._trainer.cad.pool.timeline.recording:
            return
        world = self._trainer.world
        mine = self._trainer.cad.pool.timeline.take(world.rank)
        gathered: list[Any] = [None] * world.size
        dist.gather_object(mine, gathered if self._speaks else None)
        names = {}
        for place, (number, events) in enumerate(self._trainer.cad.server_timelines().items(), world.size):
            names[place] = f"server {number}"
            gathered.append([event | {"rank": place} for event in events])
        if self._speaks:
            with warned_of(self._folder.timeline):
                write_timeline(self._folder.timeline, [event for events in gathered for event in events], names)
                self._drawn.append(self._folder.timeline)

    def _draw(self) -> None:
        """balance.png, and with stages phases.json and phases.png: means over steps, each series against its own mean,
        as the plan counts one layer and the clock all of them."""
        recorder = self._recorder
        before, after, measured = (
            seconds / seconds.sum(axis=0).mean() if seconds.sum() > 0 else None
            for seconds in (recorder.before, recorder.after, recorder.measured[None])
        )
        if before is not None and after is not None and measured is not None:
            planned = after if self._config.cad.enabled else None
            parts = recorder.parts if len(recorder.phases.kinds) > 1 else ()
            look: dict[str, Any] = {"unit": "1 = mean", "slowest_first": True, "parts": parts}
            plot_balance(self._folder.balance_plot, before, planned, measured[0], **look)
            self._drawn.append(self._folder.balance_plot)
        phases, options = recorder.phases, self._trainer.cad.options
        if phases.steps:
            phases.write(self._folder.phases, options.stages, options.servers)
            plot_phases(self._folder.phases_plot, phases, options.stages, options.servers)
            self._drawn.append(self._folder.phases_plot)


def _not_recorded(log: LogConfig, first: int, last: int) -> list[str]:
    """Sentences on a timeline or profile that has none of the steps from ``first`` to ``last``, which this run does."""
    return [
        f"No {name}: log.{name}_steps is {list(wanted)}, and this run does steps {first} to {last}."
        for name, wanted in (("timeline", log.timeline_steps), ("profile", log.profile_steps))
        if wanted and (wanted[0] > last or wanted[1] < first)
    ]


def _diverged(step: int, loss: float, grad_norm: float, config: RunConfig) -> DivergedError:
    optimizer = config.optimizer
    return DivergedError(
        f"Step {step} has loss {loss:g} and gradient norm {grad_norm:g}, with optimizer.lr {optimizer.lr:g}, "
        f"optimizer.clip_grad {optimizer.clip_grad:g} and optimizer.warmup_steps {config.resolved_warmup_steps}; "
        "what follows could only be worse, so the run ends here."
    )
