"""The choice of a run's folder when it starts: a new one, or that of a run which it resumes; and holding it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from distca.errors import ConfigError, DamagedCheckpointError, system_words
from distca.train.checkpoint.integrity import COMPLETE
from distca.train.config.cli import to_yaml
from distca.train.config.schema import RESUME_BY_NAME, RESUME_OR_START, RunConfig
from distca.train.run.run_folder import Checkpoint, RunFolder, newest_intact

_HOLDER = ".held-by"


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
        return (checkpoint.path / COMPLETE).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _job() -> str:
    """Words for the Slurm job of this process, which keeps its number when it is requeued."""
    job = os.environ.get("SLURM_JOB_ID")
    return f", Slurm job {job}" if job else ""


def _job_of(holder: Path) -> str:
    """These words for the job that had a run last; empty where none did."""
    try:
        found = re.search(r", Slurm job \d+$", holder.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return found[0] if found else ""


def _belongs_to_this_job(run: Path) -> bool:
    return bool(_job()) and _job_of(run / _HOLDER) == _job()


@contextmanager
def hold(folder: RunFolder, trains: bool = True) -> Iterator[None]:
    """Keep other processes from writing into a run's folder. Call it on one rank. The file system lets go of it when
    this process ends, however it does; one of a network may keep it when the whole machine dies.

    Args:
        folder: the run's.
        trains: this process goes on with the run; else the run stays with the Slurm job that had it.

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
            job = _job() if trains else _job_of(holder)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}{job}")
            file.flush()
        yield


def create_run_folder(config: RunConfig) -> RunFolder:
    """Make the folder of a new run and write config.yaml there.

    The folder is output/name, or the first free one of output/name-2, -3 ... where that exists. Call it on one rank and
    tell the others the path.
    """
    base = Path(config.output) / config.name
    try:
        return _create(base, config)
    except OSError as error:
        raise ConfigError(
            f"output is {config.output}, but nothing can be written into {base.parent} ({system_words(error)}); make "
            "room, or change it."
        ) from None


def _create(base: Path, config: RunConfig) -> RunFolder:
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
    try:
        folder.config.write_text(to_yaml(config), encoding="utf-8")
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return folder


def resume_run_folder(config: RunConfig) -> tuple[RunFolder, Checkpoint] | None:
    """The folder and the newest checkpoint that ``checkpoint.resume`` asks for, of those with files of the right sizes.

    Nothing is written: every rank may ask. The rank that starts the run then calls ``write_resumed_config``. None where
    a new run is to be started.

    Raises:
        ConfigError: where there is no such run, or no complete checkpoint in it, or only damaged ones.
    """
    asked = str(config.checkpoint.resume)
    folder = _latest_run(config) if asked in RESUME_BY_NAME else RunFolder(Path(asked))
    if folder is None:
        return None
    if not folder.path.is_dir():
        raise ConfigError(f"checkpoint.resume names {folder.path}, which is not a folder; give the folder of a run.")
    if (folder.path / COMPLETE).exists():
        run = folder.path.absolute().parents[1]
        raise ConfigError(f"checkpoint.resume names {folder.path}, a checkpoint; give the folder of its run, {run}.")
    if not folder.checkpoints():
        raise ConfigError(
            f"checkpoint.resume names {folder.path}, which has no complete checkpoint; "
            "save some with checkpoint.save_every, or start anew without checkpoint.resume."
        )
    checkpoint = newest_intact(folder)
    if checkpoint is None:
        raise DamagedCheckpointError(f"All checkpoints of {folder.path} are damaged, as the lines above say.")
    return folder, checkpoint


def _latest_run(config: RunConfig) -> RunFolder | None:
    """The run of this name that saved the newest complete checkpoint, for job and auto first among this job's."""
    base = Path(config.output) / config.name
    runs = []
    for path in base.parent.iterdir() if base.parent.is_dir() else ():
        if path.name == base.name or (
            re.fullmatch(re.escape(base.name) + r"-\d+", path.name) and not _is_first_of_its_name(path)
        ):
            runs += [(saved, path) for each in RunFolder(path).checkpoints() if (saved := _saved_at(each))]
    if config.checkpoint.resume in RESUME_OR_START:
        own = [(saved, path) for saved, path in runs if _belongs_to_this_job(path)]
        runs = own or (runs if config.checkpoint.resume == "auto" else [])
        return RunFolder(max(runs)[1]) if runs else None
    if not runs:
        raise ConfigError(
            f"checkpoint.resume is latest, but no run {base} has a complete checkpoint; "
            "check name and output, or start anew without checkpoint.resume."
        )
    return RunFolder(max(runs)[1])
