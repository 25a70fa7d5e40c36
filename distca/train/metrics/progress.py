"""The display of a run for people: a progress bar with the figures that matter, or plain lines, and a
table at the end."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from distca.log import console as shared_console
from distca.train.run.run_folder import RunFolder
from distca.words import count, format_bytes

logger = logging.getLogger(__name__)

SMOOTHED = 10
"""Steps of which a loss is shown as the mean. Batches of unequal texts differ by more than a run learns in a step."""
_LATEST = 20
"""Steps by whose time the rest of the run is judged."""
_WIDE = 120
"""Characters of a terminal from which on the bar has its full width."""
_FIRST_TO_GO = ("of this step", "tokens", "perplexity", "GiB", "gradient", "MFU", "imbalance", "validation", "tokens/s")
"""Figures that a narrow terminal does not show beside the bar, in this order."""
_IMBALANCE = "time of {} on the busiest rank over the mean"


class StepProgress:
    """Progress of the steps on rank 0; other ranks make none.

    On a terminal it is a bar whose figures follow every step. Elsewhere (a log file, Slurm) it is one log line every
    ``every`` steps and at the last step.

    Args:
        steps: steps of the whole run.
        done: steps that were done before, in a resumed run.
        every: steps between log lines where there is no terminal.
        leveled: what plans level: attention, or with linear layers.
        console: where to draw; the process's standard error by default.
    """

    def __init__(
        self,
        steps: int,
        *,
        done: int = 0,
        every: int = 1,
        leveled: str = "attention",
        console: Console | None = None,
    ) -> None:
        self._steps = steps
        self._leveled = leveled
        self._every = every
        self._losses: deque[float] = deque(maxlen=SMOOTHED)
        self._seconds: deque[float] = deque(maxlen=_LATEST)
        self._console = console or shared_console()
        self._bar: Progress | None = None
        if self._console.is_terminal:
            width = self._console.width
            bar = 24 if width >= _WIDE else 10
            # Beside "step", "7/60", the bar and "0:00:00", and a space behind each.
            self._room = width - len(f"step {steps}/{steps} 0:00:00 ") - bar - 2
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=bar),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[figures]}"),
                console=self._console,
            )
            self._task = self._bar.add_task("train", total=steps, completed=done, figures="")

    def update(self, step: int, values: Mapping[str, object]) -> None:
        """Show step ``step`` (counted from 1) with its metrics, keyed as in ``distca.train.metrics.writer``."""
        for kept, key in ((self._losses, "loss"), (self._seconds, "step_s")):
            if isinstance(value := values.get(key), int | float):
                kept.append(value)
        means: dict[str, float | str] = {}
        if self._losses:
            means["mean_loss"] = sum(self._losses) / len(self._losses)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=_figures({**values, **means}, self._room))
        elif step % self._every == 0 or step == self._steps:
            if self._seconds and step < self._steps:
                seconds = (self._steps - step) * sum(self._seconds) / len(self._seconds)
                means["eta"] = str(timedelta(seconds=round(seconds)))
            logger.info("step %d/%d  %s", step, self._steps, _figures({**values, **means}))

    def validating(self, step: int) -> None:
        """Show that step ``step`` is done and its validation runs."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures="validating")

    def __enter__(self) -> StepProgress:
        logger.info(
            "Below, loss is the mean of the last %d steps, and perplexity e to that loss. Gradient is its norm before "
            "clipping. Imbalance is the %s in this step: with documents at home → as planned.",
            *(SMOOTHED, _IMBALANCE.format(self._leveled)),
        )
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The figures of the table at the end; a line whose figure is None is left out.

    Attributes:
        steps: steps that this start of the run has done.
        first_step: number of the first of them; above 1 in a resumed run.
        smoothed: steps of which the two losses are the mean.
        first_loss: loss of the first of them.
        last_loss: loss of the last of them.
        validation_loss: loss over the validation set at the end.
        tokens_per_s: mean over all steps but the first, of all ranks together.
        mfu: share of the devices' peak, mean over the same steps.
        leveled: what plans level: attention, or with linear layers.
        imbalance_before: its time on the busiest rank over the mean, mean over steps, with documents at home.
        imbalance_after: the same with the plans that ran.
        imbalance_measured: the same from measured seconds.
        bytes_moved: bytes per step that all ranks sent for attention, mean.
        plan_ms: milliseconds of planning per step, mean.
        peak_memory_gb: largest device memory of any rank, GiB.
        slowest: the GPU that was slowest over the last steps.
        left_out: documents that the run was not given, by reason.
        exported: the Hugging Face folder that was written.
    """

    steps: int
    first_step: int = 1
    smoothed: int = 1
    first_loss: float | None = None
    last_loss: float | None = None
    validation_loss: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    leveled: str = "attention"
    imbalance_before: float | None = None
    imbalance_after: float | None = None
    imbalance_measured: float | None = None
    bytes_moved: float | None = None
    plan_ms: float | None = None
    peak_memory_gb: float | None = None
    slowest: str | None = None
    left_out: tuple[str, ...] = ()
    exported: str | None = None


def print_summary(
    summary: RunSummary, folder: RunFolder, drawn: Collection[Path], console: Console | None = None
) -> None:
    """Draw the table at the end of a run, with its files.

    Args:
        summary: what to say.
        folder: the run's.
        drawn: pictures and timelines that this start of the run has written: others may be there from before.
        console: where to draw; the process's standard error by default.
    """
    resumed = f", from step {summary.first_step} on" if summary.first_step > 1 else ""
    title = f"{folder.path.name}: {count(summary.steps, 'step')}{resumed}"
    said = (
        f"imbalance: {_IMBALANCE.format(summary.leveled)}, mean of all steps"
        if summary.imbalance_before is not None
        else None
    )
    table = Table(title=title, show_header=False, title_justify="left", caption=said, caption_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in _summary_rows(summary):
        table.add_row(name, text)
    table.add_section()
    for name, path in (
        ("settings", folder.config if summary.first_step == 1 else folder.resumed_config(summary.first_step - 1)),
        ("metrics", folder.metrics),
        ("attention per rank", folder.balance_plot),
        ("attention per phase and rank", folder.phases_plot),
        ("timeline (ui.perfetto.dev)", folder.timeline),
        ("TensorBoard", folder.tensorboard),
    ):
        of_this_start = path in drawn or path not in (folder.balance_plot, folder.phases_plot, folder.timeline)
        if of_this_start and path.exists():
            table.add_row(name, str(path))
    checkpoints = folder.checkpoints()
    if checkpoints:
        table.add_row("last checkpoint", str(checkpoints[-1].path))
    if summary.exported:
        table.add_row("Hugging Face folder", summary.exported)
    (console or shared_console()).print(table)


def _summary_rows(summary: RunSummary) -> list[tuple[str, str]]:
    rows = []
    if summary.first_loss is not None and summary.last_loss is not None:
        last_step = summary.first_step + summary.steps - 1
        first, last = (
            _steps(start, summary.smoothed) for start in (summary.first_step, last_step - summary.smoothed + 1)
        )
        if summary.steps == 1:
            rows.append((f"loss, step {last}", f"{summary.last_loss:.4f}"))
        else:
            steps = "mean of steps" if summary.smoothed > 1 else "step"
            rows.append((f"loss, {steps} {first} → {last}", f"{summary.first_loss:.4f} → {summary.last_loss:.4f}"))
    for name, value, text in (
        ("validation loss", summary.validation_loss, "{:.4f}"),
        ("tokens/s", summary.tokens_per_s, "{:,.0f}"),
        ("share of the GPUs' peak (MFU)", summary.mfu, "{:.1%}"),
        ("imbalance at home", summary.imbalance_before, "{:.3f}"),
        ("imbalance planned", summary.imbalance_after, "{:.3f}"),
        ("imbalance measured", summary.imbalance_measured, "{:.3f}"),
        ("planning per step, in the background", summary.plan_ms, "{:.1f} ms"),
        ("peak memory of a rank", summary.peak_memory_gb, "{:.2f} GiB"),
    ):
        if value is not None:
            rows.append((name, text.format(value)))
    if summary.slowest is not None:
        rows.append(("slowest GPU", summary.slowest))
    if summary.bytes_moved is not None:
        rows.append(("moved for attention per step", format_bytes(summary.bytes_moved)))
    rows += [("left out", each) for each in summary.left_out]
    return rows


def _steps(first: int, number: int) -> str:
    return str(first) if number == 1 else f"{first} to {first + number - 1}"


def perplexity(loss: float) -> float:
    """The perplexity of a mean loss per token; infinite where no number holds it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _figures(values: Mapping[str, object], room: int | None = None) -> str:
    """The figures of one step on one line; left out is what a step does not have, and, of those that can be, what does
    not fit into so many characters."""
    parts = {}
    loss = values.get("mean_loss")
    if isinstance(loss, int | float):
        values = {**values, "perplexity": perplexity(loss)}
    for name, key, text in (
        ("loss", "mean_loss", "{:.4f}"),
        ("of this step", "loss", "{:.4f}"),
        ("perplexity", "perplexity", "{:,.4g}"),
        ("validation", "validation_loss", "{:.4f}"),
        ("gradient", "grad_norm", "{:.3g}"),
        ("tokens/s", "tokens_per_s", "{:,.0f}"),
        ("MFU", "mfu", "{:.1%}"),
        ("tokens", "tokens_seen", "{:,.0f}"),
        ("GiB", "peak_memory_gb", "{:.1f}"),
        ("ETA", "eta", "{}"),
    ):
        value = values.get(key)
        if value is not None:
            parts[name] = f"{name} {text.format(value)}"
    before, after = values.get("imbalance_before"), values.get("imbalance_after")
    if before is not None and after is not None:
        parts["imbalance"] = f"imbalance {before:.2f} → {after:.2f}"
    for name in _FIRST_TO_GO:
        if room is not None and len("  ".join(parts.values())) > room:
            parts.pop(name, None)
    return "  ".join(parts.values())
