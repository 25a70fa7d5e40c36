"""The folder of a run, and the checkpoints in it.

    runs/llama-tiny/config.yaml            the settings the run started with
                    metrics.jsonl          figures of every step
                    balance.png            attention time per rank, before and after balancing
                    phases.json, .png      attention time per pipeline phase and rank (with stages)
                    timeline.json          recorded steps; opens in Perfetto
                    tensorboard/
                    checkpoints/step_000060/
                    .held-by               who writes here, while somebody does

Steps are counted from 1, so ``step_000060`` is the state after 60 optimizer steps.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from distca.errors import ConfigError, DamagedCheckpointError
from distca.train.config.cli import RunConfig, to_yaml

_HOLDER = ".held-by"
_COMPLETE = "COMPLETE"
"""Marks a checkpoint that every rank has written; holds the bytes of each of its files (empty in early versions)."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        step: optimizer steps that were done when it was saved.
        path: its folder.
    """

    step: int
    path: Path


@dataclass(frozen=True)
class RunFolder:
    """Names of everything a run writes.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def balance_plot(self) -> Path:
        return self.path / "balance.png"

    @property
    def phases(self) -> Path:
        return self.path / "phases.json"

    @property
    def phases_plot(self) -> Path:
        return self.path / "phases.png"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint after ``step`` steps belongs: ``checkpoints/step_000060``."""
        return self.path / "checkpoints" / f"step_{step:06d}"

    def clear_checkpoint(self, step: int) -> Path:
        """An empty folder for the checkpoint of ``step``, without what an attempt that was broken off left there."""
        path = self.checkpoint_path(step)
        if path.exists():
            (path / _COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(path)
        path.mkdir(parents=True)
        return path

    def mark_complete(self, step: int) -> Checkpoint:
        """Say that every rank has finished writing the checkpoint of ``step``; until then nobody resumes from it."""
        path = self.checkpoint_path(step)
        unfinished = path / f"{_COMPLETE}.unfinished"
        sizes = {file.relative_to(path).as_posix(): _size(file) for file in sorted(path.rglob("*")) if file.is_file()}
        unfinished.write_text(json.dumps(sizes, indent=1), encoding="utf-8")
        unfinished.replace(path / _COMPLETE)
        return Checkpoint(step, path)

    def write_resumed_config(self, config: RunConfig, step: int) -> None:
        """Write the settings of the part that resumes after ``step``, beside config.yaml, which stays as it is."""
        path = self.path / f"config-from-step-{step:06d}.yaml"
        path.write_text(to_yaml(config), encoding="utf-8")

    def settings_before(self, step: int) -> dict[str, Any]:
        """Nested settings, as YAML has them, of the part of the run that did ``step``; empty where they are unknown."""
        parts = {0: self.config}
        for path in self.path.glob("config-from-step-*.yaml"):
            if begins := re.fullmatch(r"config-from-step-(\d+)\.yaml", path.name):
                parts[int(begins[1])] = path
        try:
            found = yaml.safe_load(parts[max(first for first in parts if first < step)].read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return found if isinstance(found, dict) else {}

    def checkpoints(self) -> list[Checkpoint]:
        """All complete checkpoints, oldest first."""
        complete = (path for path in self._checkpoint_folders() if (path / _COMPLETE).exists())
        found = [Checkpoint(int(path.name.removeprefix("step_")), path) for path in complete]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def _checkpoint_folders(self) -> Iterator[Path]:
        """Of this run, complete or not; what else lies there is somebody's own."""
        for path in (self.path / "checkpoints").glob("step_*"):
            if re.fullmatch(r"step_\d+", path.name) and path.is_dir() and not path.is_symlink():
                yield path

    def prune(self, keep: int) -> list[Checkpoint]:
        """Delete all complete checkpoints but the ``keep`` newest, and those that a killed run left unfinished; returns
        the complete ones. Call it on one rank, while none is being written."""
        for path in self._checkpoint_folders():
            if not (path / _COMPLETE).exists():
                shutil.rmtree(path, ignore_errors=True)  # they are in nobody's way
        old = self.checkpoints()[: -keep or None]
        for checkpoint in old:
            # Without its mark a half-deleted checkpoint is not taken for a complete one.
            (checkpoint.path / _COMPLETE).unlink()
            shutil.rmtree(checkpoint.path)
        return old


def _size(file: Path) -> int:
    """Bytes of a file that another rank may have written just now."""
    with file.open("rb") as opened:  # network file systems look at the file itself, and not at a memory, when opening
        return os.fstat(opened.fileno()).st_size


def check_undamaged(checkpoint: Path) -> None:
    """Compare the files of a complete checkpoint with the sizes that they were saved with.

    Raises:
        DamagedCheckpoint: naming the first file that differs.
    """
    text = (checkpoint / _COMPLETE).read_text(encoding="utf-8", errors="replace")
    try:
        sizes: dict[str, int] = dict(json.loads(text)) if text else {}
    except (ValueError, TypeError):
        raise damaged(checkpoint, f"its {_COMPLETE} cannot be read") from None
    for name, size in sizes.items():
        file = checkpoint / name
        if not file.is_file():
            raise damaged(checkpoint, f"{name} is missing")
        if file.stat().st_size != size:
            raise damaged(checkpoint, f"{name} has {file.stat().st_size:,} bytes, not {size:,}")


def damaged(checkpoint: Path, what: str) -> DamagedCheckpointError:
    """What to say about a checkpoint in which ``what`` is wrong."""
    return DamagedCheckpointError(f"{checkpoint} is damaged: {what}. Delete this folder.")


def _is_first_of_its_name(run: Path) -> bool:
    """The folder NAME-2 may be the second run of NAME, or the first of NAME-2."""
    try:
        settings = yaml.safe_load(RunFolder(run).config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(settings, dict) and settings.get("name") == run.name


def _saved_at(checkpoint: Checkpoint) -> int:
    """When it was complete, in nanoseconds; 0 if its run has deleted it meanwhile."""
    try:
        return (checkpoint.path / _COMPLETE).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


@contextmanager
def hold(folder: RunFolder) -> Iterator[None]:
    """Keep other processes from writing into a run's folder. Call it on one rank. The file system lets go of it when
    this process ends, however it does; one of a network may keep it when the whole machine dies.

    Raises:
        ConfigError: another process holds it, or nothing can be written there.
    """
    holder = folder.path / _HOLDER
    try:
        file = holder.open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{holder} cannot be written ({error.strerror}); make {folder.path} writable.") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                f"{folder.path} is being written by {file.read().strip() or 'another run'}; wait until that run ends, "
                f"or end it. If its machine is gone, delete {holder}."
            ) from None
        except OSError:
            pass  # a file system without locks: as before there were any
        with suppress(OSError):  # a full disk; the lock does not need the words
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield


def create_run_folder(config: RunConfig) -> RunFolder:
    """Make the folder of a new run and write config.yaml there.

    The folder is output/name, or the first free one of output/name-2, -3 ... where that exists. Call it on one rank and
    tell the others the path.
    """
    base = Path(config.output) / config.name
    base.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            path.mkdir()  # two runs that start together cannot both succeed here
            break
        except FileExistsError:
            number += 1
    folder = RunFolder(path)
    folder.config.write_text(to_yaml(config), encoding="utf-8")
    return folder


def resume_run_folder(config: RunConfig) -> tuple[RunFolder, Checkpoint]:
    """The folder and the newest complete checkpoint that ``checkpoint.resume`` asks for.

    Nothing is written: every rank may ask. The rank that starts the run then calls ``write_resumed_config``.

    Raises:
        ConfigError: where there is no such run, or no complete checkpoint in it.
    """
    latest = config.checkpoint.resume == "latest"
    folder = _latest_run(config) if latest else RunFolder(Path(str(config.checkpoint.resume)))
    if not folder.path.is_dir():
        raise ConfigError(f"checkpoint.resume names {folder.path}, which is not a folder; give the folder of a run.")
    checkpoints = folder.checkpoints()
    if not checkpoints:
        raise ConfigError(
            f"checkpoint.resume names {folder.path}, which has no complete checkpoint; "
            "save some with checkpoint.save_every, or start anew without checkpoint.resume."
        )
    return folder, checkpoints[-1]


def _latest_run(config: RunConfig) -> RunFolder:
    """The run of this name that saved the newest complete checkpoint."""
    base = Path(config.output) / config.name
    runs = []
    for path in base.parent.iterdir() if base.parent.is_dir() else ():
        if path.name == base.name or (
            re.fullmatch(re.escape(base.name) + r"-\d+", path.name) and not _is_first_of_its_name(path)
        ):
            runs += [(saved, path) for each in RunFolder(path).checkpoints() if (saved := _saved_at(each))]
    if not runs:
        raise ConfigError(
            f"checkpoint.resume is latest, but no run {base} has a complete checkpoint; "
            "check name and output, or start anew without checkpoint.resume."
        )
    return RunFolder(max(runs)[1])
