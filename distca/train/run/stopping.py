"""When a run saves, or saves and ends before its last step: all ranks decide it alike."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from distca.cluster.timeout import TIMEOUT
from distca.train.config.schema import RunConfig
from distca.train.launch.start import FINISHED

if TYPE_CHECKING:
    from megatron_patches.ranks.world import World

_REASONS = ("SIGTERM", "SIGUSR1", "train.time_limit")


def say_finished() -> None:
    """Tells the launcher that no step is left, so that it does not queue a Slurm job again; rank 0 calls it."""
    if FINISHED in os.environ:
        with suppress(OSError):  # the launcher is on another machine
            Path(os.environ[FINISHED]).touch()


@dataclass(frozen=True)
class Decision:
    """The decision of all ranks after a step.

    Attributes:
        save: a checkpoint is due by the clock.
        stop: why the run saves and ends; empty where it goes on.
        failed: a checkpoint could not be written in the background.
    """

    save: bool
    stop: str
    failed: bool = False


class Stopping:
    """Every rank makes one together.

    Signals may reach some ranks earlier than others, and clocks differ. So ranks exchange what they want while a step
    runs, and do after it what any of them wanted before it. Of time, rank 0's counts.

    Args:
        config: the run.
        world: its ranks.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        self._world = world
        self._limit, self._save_every = 60 * config.train.time_limit, 60 * config.checkpoint.save_every_minutes
        self._began = self._saved = time.monotonic()
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._wanted = torch.zeros(len(_REASONS) + 2, dtype=torch.int32)
        self._asked: dist.Work | None = None
        if world.health is not None:
            world.health.stops_when_asked()

    def ask(self, failed: bool = False) -> None:
        """Begin to exchange what ranks want, before a step; every rank calls it.

        Args:
            failed: this rank knows of a checkpoint that could not be written.
        """
        signal = self._world.health.asked_by if self._world.health is not None else ""
        now, decides = time.monotonic(), self._world.rank == 0
        late = decides and 0 < self._limit < now - self._began
        due = decides and 0 < self._save_every < now - self._saved
        told = [signal == reason for reason in _REASONS[:2]]
        self._wanted = torch.tensor([*told, late, due, failed], dtype=torch.int32)
        self._asked = dist.all_reduce(self._wanted, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def decide(self) -> Decision:
        """Returns the decision that all ranks follow after the step."""
        assert self._asked is not None
        self._asked.wait()
        *stops, save, failed = self._wanted.tolist()
        stop = next((reason for reason, wanted in zip(_REASONS, stops, strict=True) if wanted), "")
        return Decision(bool(save), stop, bool(failed))

    def saved(self) -> None:
        """Note that a checkpoint was begun."""
        self._saved = time.monotonic()
