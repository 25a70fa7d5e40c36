"""The folder of a run, and the checkpoints in it.

    runs/llama-tiny/config.yaml            the settings the run started with
                    config-from-step-...   those of a part that resumed (config-from-step-000060.yaml)
                    starts.json            command, hosts, versions and commit of every start
                    console.log            what rank 0 said
                    ranks/rank_0001.log    what another one said, in more words than on the console
                    metrics.jsonl          figures of every step
                    balance.png            attention time per rank, before and after balancing
                    phases.json, .png      attention time per pipeline phase and rank (with stages)
                    timeline.json          recorded steps; opens in Perfetto
                    profile/               traces of torch's profiler, one a rank
                    tensorboard/
                    checkpoints/step_000060/
                    .held-by               who writes here, or did last

Steps are counted from 1, so ``step_000060`` is the state after 60 optimizer steps.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from distca.errors import ConfigError, DamagedCheckpointError, system_words
from distca.train.checkpoint.integrity import (
    COMPLETE,
    FileFacts,
    check_undamaged,
    describe_files,
    files_of,
    sync,
    sync_files,
    write_durably,
)
from distca.train.config.cli import to_yaml
from distca.train.config.schema import RunConfig

logger = logging.getLogger(__name__)


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

    def resumed_config(self, step: int) -> Path:
        """Settings of the part that resumed after ``step``."""
        return self.path / f"config-from-step-{step:06d}.yaml"

    @property
    def starts(self) -> Path:
        return self.path / "starts.json"

    @property
    def console_log(self) -> Path:
        return self.path / "console.log"

    def log_of(self, rank: int) -> Path:
        """``ranks/rank_0001.log``; rank 0's is the console's."""
        return self.path / "ranks" / f"rank_{rank:04d}.log" if rank else self.console_log

    @property
    def profile(self) -> Path:
        return self.path / "profile"

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
        """Returns the place of the checkpoint after ``step`` steps: ``checkpoints/step_000060``."""
        return self.path / "checkpoints" / f"step_{step:06d}"

    def clear_checkpoint(self, step: int) -> Path:
        """An empty folder for the checkpoint of ``step``, without what an attempt that was broken off left there."""
        path = self.checkpoint_path(step)
        if path.exists():
            (path / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(path)
        path.mkdir(parents=True)
        return path

    def mark_complete(self, step: int, written: Mapping[str, FileFacts] = MappingProxyType({})) -> Checkpoint:
        """Say that every rank has finished writing the checkpoint of ``step``; until then nobody resumes from it.

        Args:
            step: of the checkpoint.
            written: what ranks know of the files that they wrote, by name; other files are read.
        """
        path = self.checkpoint_path(step)
        unfinished = path / f"{COMPLETE}.unfinished"
        names = [name for name in files_of(path) if name not in written and COMPLETE not in name]
        sync_files(path, names)
        own = describe_files(path, names)
        write_durably(unfinished, json.dumps({**own, **written}, indent=1, sort_keys=True))
        unfinished.replace(path / COMPLETE)
        for folder in (path, path.parent):
            sync(folder)
        return Checkpoint(step, path)

    def write_resumed_config(self, config: RunConfig, step: int) -> None:
        """Write the settings of the part that resumes after ``step``, beside config.yaml, which stays as it is. Those
        of parts that began later are deleted, as their steps are done again."""
        path = self.resumed_config(step)
        try:
            for begins, later in self._resumed_configs().items():
                if begins > step:
                    later.unlink(missing_ok=True)
            path.write_text(to_yaml(config), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({system_words(error)}); make room.") from None

    def settings_of(self, step: int) -> Path:
        """Returns the file with the settings of the part of the run that did ``step``."""
        parts = {0: self.config} | self._resumed_configs()
        return parts[max(first for first in parts if first < step)]

    def settings_before(self, step: int) -> dict[str, Any]:
        """Nested settings, as YAML has them, of the part of the run that did ``step``; empty where they are unknown."""
        try:
            found = yaml.safe_load(self.settings_of(step).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return found if isinstance(found, dict) else {}

    def _resumed_configs(self) -> dict[int, Path]:
        """The settings of parts that resumed, by the step after which each began."""
        names = ((re.fullmatch(r"config-from-step-(\d+)\.yaml", path.name), path) for path in self.path.iterdir())
        return {int(begins[1]): path for begins, path in names if begins}

    def checkpoints(self) -> list[Checkpoint]:
        """All complete checkpoints, oldest first."""
        complete = (path for path in self.checkpoint_folders() if (path / COMPLETE).exists())
        return [Checkpoint(int(path.name.removeprefix("step_")), path) for path in complete]

    def checkpoint_folders(self) -> list[Path]:
        """This run's checkpoints, complete or not, oldest first; what else lies there is somebody's own."""
        found = [
            path
            for path in (self.path / "checkpoints").glob("step_*")
            if re.fullmatch(r"step_\d+", path.name) and path.is_dir() and not path.is_symlink()
        ]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))

    def prune(self, keep: int, newest: int | None = None) -> list[Path]:
        """Delete all complete checkpoints but the ``keep`` newest, and those that a killed run left unfinished; returns
        folders that cannot be deleted, which are warned about. A damaged one does not count as kept, so it never costs
        an intact one. Those after step ``newest``, from which nothing went on, do not count either, and stay. Call it
        on one rank, while none is being written."""
        unwanted = [path for path in self.checkpoint_folders() if not (path / COMPLETE).exists()]
        old = [each for each in self.checkpoints() if newest is None or each.step <= newest]
        while old and keep:
            keep -= _is_intact(old.pop())
        unwanted += [checkpoint.path for checkpoint in old]
        for path in unwanted:
            _delete(path)
        return [path for path in unwanted if path.exists()]


def _delete(checkpoint: Path) -> None:
    """Delete a checkpoint's folder, or what can be deleted of it, and warn of what is left."""
    whole = True
    try:
        # Without its mark a half-deleted checkpoint is not taken for a complete one.
        (checkpoint / COMPLETE).unlink(missing_ok=True)
        whole = False
        shutil.rmtree(checkpoint)
    except OSError as error:
        if not whole:
            shutil.rmtree(checkpoint, ignore_errors=True)  # all else of it
        left = "it stays as it was" if whole else "what is left of it is no checkpoint any more"
        logger.warning("%s cannot be deleted (%s); %s.", checkpoint, system_words(error), left)


def _is_intact(checkpoint: Checkpoint) -> bool:
    try:
        check_undamaged(checkpoint.path)
    except DamagedCheckpointError:
        return False
    return True


@cache
def warn_of_damage(what: str) -> None:
    """Say once that a checkpoint is passed over."""
    logger.warning("%s The one before is tried.", what)


def newest_intact(folder: RunFolder, before: int | None = None) -> Checkpoint | None:
    """The newest complete checkpoint whose files have the sizes that were saved, or of those before a step; newer ones
    are warned about."""
    for checkpoint in reversed(folder.checkpoints()):
        if before is not None and checkpoint.step >= before:
            continue
        try:
            check_undamaged(checkpoint.path)
            return checkpoint
        except DamagedCheckpointError as error:
            warn_of_damage(str(error))
    return None
