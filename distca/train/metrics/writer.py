"""Figures of every step, in ``metrics.jsonl`` (one JSON object a line) and, on request, as TensorBoard events.

Keys that other parts of the project read, where a step has them:

    loss                mean loss per target token of the global batch
    validation_loss     the same over the validation set
    lr, grad_norm       learning rate of the step; gradient norm before clipping
    tokens              tokens of the global batch
    tokens_seen         tokens of all global batches so far, of the whole run
    step_s              seconds of the step, without what is recorded, validated and saved after it
    tokens_per_s        tokens / step_s, of all ranks together
    mfu                 share of the device's dense peak spent on the model's own FLOPs, for linear layers in FP8
                        of FP8's (absent where no peak is known)
    imbalance_before    planned attention time of the busiest rank over the mean, every document computed at home; where
                        plans level a pipeline's phases by time, here and below with linear layers' time
    imbalance_after     the same with the plan that ran
    imbalance_measured  attention seconds measured over the whole step, busiest rank over the mean (the planned figures
                        add up the busiest rank of every micro-batch or phase, so they are the stricter ones)
    imbalance_phases    with pipeline stages: attention seconds measured in every phase, slowest rank over the mean, if
                        each phase lasts as long as its slowest rank (what imbalance_after plans)
    bytes_moved         bytes that all ranks sent for attention in the step
    recurrent_bytes_moved  in hybrid stacks: the same for recurrent layers, halos and summaries
    plan_ms             milliseconds of planning (in the background, one step ahead)
    plan_wait_ms        milliseconds that the step waited for its plan
    attention_s         by rank, then by server without a model, seconds that it computed attention, without waits
    expert_load_max     in models with experts: rows of the most loaded expert over the mean, in the layer where that is
                        most; of every layer in expert_load_max_layer_1 ..., of every expert, a list, in
                        expert_load_layer_1 ... (numbers of layers in the whole model)
    experts_without_rows  experts of all layers that got none in the step
    router_entropy      entropy of routers' scores in nats, in the mean over rows and layers; also of each layer
    peak_memory_gb      on GPUs: largest allocated device memory of any rank, GiB; with pipeline stages also of each
                        stage's ranks, as peak_memory_gb_stage_0, peak_memory_gb_stage_1 ...
    predicted_memory_gb the same as predicted from the settings (distca.train.run.memory), also by stage
    outside_torch_gib   on GPUs: largest device memory of any rank that is neither free, nor torch's, nor NVSHMEM's
                        receive buffer, after the step, GiB (distca.train.run.memory_fit counts with OUTSIDE_TORCH)
    resident_memory_gb  on CPUs with log.memory: largest resident memory of any rank's process after the step, GiB
    server_peak_memory_gb, server_resident_memory_gb  the same of any server without a model
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from distca.errors import ConfigError, VersionError, system_words
from distca.train.metrics.files import EventFile, PatientFile
from distca.words import count

logger = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Writes one flushed line a step, so that a run that dies has every finished step on disk. Lines that a full disk
    does not take wait in memory.

    On resume, lines of the resumed step and later are dropped first: those steps will be done again, and would be there
    twice. A last line that the earlier run did not finish writing is dropped, too. Then lines are appended. TensorBoard
    is told to hide the dropped steps in the same way.

    Args:
        folder: the run folder; ``metrics.jsonl`` and ``tensorboard/`` are written there.
        tensorboard: also write TensorBoard events.
        resume_step: first step that will be logged in a resumed run; None starts a new file.
        wandb: project of Weights & Biases; None for none.

    Raises:
        ConfigError: a full disk, or one that can only be read, keeps a file from being opened.
        FileExistsError: where ``metrics.jsonl`` exists and ``resume_step`` is None.
        VersionError: the package wandb is missing.
    """

    def __init__(
        self, folder: Path | str, tensorboard: bool, resume_step: int | None = None, wandb: str | None = None
    ) -> None:
        self.path = Path(folder) / FILE_NAME
        self._board: EventFile | None = None
        try:
            if resume_step is not None:
                self._replace([line for line in _lines(self.path) if line["step"] < resume_step])
            self._file = PatientFile(self.path, "x" if resume_step is None else "a")
            if tensorboard:
                self._board = EventFile(Path(folder) / "tensorboard", resume_step)
        except FileExistsError:
            raise
        except OSError as error:
            raise ConfigError(
                f"The metrics of {folder} cannot be written ({system_words(error)}); make room, or make it writable."
            ) from None
        self._wandb = _start_wandb(wandb, Path(folder)) if wandb else None
        self._failing = False
        self._flush()

    def log(self, step: int, values: Mapping[str, float | int | str | list[float] | None]) -> None:
        """Write one step. Values that are None are left out; NaN and infinities, which JSON lacks, become strings."""
        entry = {"step": step} | {key: _json_value(value) for key, value in values.items() if value is not None}
        self._file.write((json.dumps(entry) + "\n").encode())
        if self._board is not None:
            self._board.log(step, values)
        self._flush()
        if self._wandb is not None:
            self._wandb.log({key: value for key, value in entry.items() if key != "step"}, step=step)

    def close(self) -> None:
        self._flush()
        if lines := self._file.waiting.count(b"\n"):
            logger.warning("%s lacks the last %s.", self.path, count(lines, "step"))
        elif self._board is not None and self._board.waiting:
            logger.warning("%s lacks the last steps.", self.path.parent / "tensorboard")
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._board is not None:
            self._board.close()

    def _flush(self) -> None:
        """Write what waits; a disk that takes nothing is a warning, said once until it takes something again."""
        try:
            self._file.flush()
            if self._board is not None:
                self._board.flush()
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "Metrics cannot be written to %s (%s). Training goes on; they are kept and written once there is "
                    "room, but a checkpoint would not fit either.",
                    *(self.path.parent, system_words(error)),
                )
            self._failing = True
        else:
            self._failing = False

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _replace(self, lines: list[dict[str, Any]]) -> None:
        """Rewrite the file through a second one, so that dying here loses nothing."""
        fresh = self.path.with_suffix(".jsonl.new")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        fresh.replace(self.path)


def check_wandb() -> Any:
    """The package wandb.

    Raises:
        VersionError: it is missing.
    """
    try:
        import wandb
    except ImportError:
        raise VersionError("log.wandb needs the package wandb: pip install wandb.") from None
    return wandb


def _start_wandb(project: str, folder: Path) -> Any:
    """A run of the folder's name, which a resumed run goes on with."""
    kept = folder / "wandb.id"
    package = check_wandb()
    number = kept.read_text(encoding="utf-8") if kept.is_file() else package.util.generate_id()
    settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    run = package.init(project=project, name=folder.name, id=number, resume="allow", dir=str(folder), config=settings)
    kept.write_text(number, encoding="utf-8")
    return run


def read_metrics(folder: Path | str) -> list[dict[str, Any]]:
    """All logged steps of a run folder, in the order they were written; NaN and infinities come back as floats."""
    return [{key: _as_float(value) for key, value in line.items()} for line in _lines(Path(folder) / FILE_NAME)]


def _lines(path: Path) -> list[dict[str, Any]]:
    """The file's entries; what a power failure left of lines is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    return [entry for line in text[: text.rfind("\n") + 1].splitlines() if (entry := _entry(line)) is not None]


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None


def _as_float(value: Any) -> Any:
    """A value of a line, with floats in place of the strings of :func:`_json_value`."""
    if isinstance(value, list):
        return [_as_float(each) for each in value]
    special = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    return special.get(value, value) if isinstance(value, str) else value


def _json_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_json_value(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value
