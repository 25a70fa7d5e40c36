"""What ranks do after a step is decided alike, by what any of them wanted before it and by rank 0's clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from distca.testing.ranks import run_ranks
from distca.train.config.cli import parse_run_config
from distca.train.run import stopping
from distca.train.run.stopping import Decision, Stopping


def _decided() -> list[Decision]:
    """After steps: nothing wanted; rank 1 got a signal; rank 1's clock is late; rank 0's is; saved; time is over;
    rank 1 could not write a checkpoint."""
    rank = dist.get_rank()
    now = [0.0]
    stopping.time = SimpleNamespace(monotonic=lambda: now[0])  # type: ignore[assignment]
    health: Any = SimpleNamespace(asked_by="", stops_when_asked=lambda: None)
    world: Any = SimpleNamespace(rank=rank, health=health)
    config = parse_run_config(["--checkpoint.save_every_minutes", "1", "--train.time_limit", "5"])
    asked = Stopping(config, world)
    found = []

    def step() -> None:
        asked.ask()
        found.append(asked.decide())

    step()
    health.asked_by = "SIGUSR1" if rank == 1 else ""
    step()
    health.asked_by, now[0] = "", 61.0 if rank == 1 else 59.0
    step()
    now[0] = 61.0
    step()
    asked.saved()
    step()
    now[0] = 301.0
    step()
    now[0] = 0.0
    asked.ask(failed=rank == 1)
    return [*found, asked.decide()]


def test_ranks_decide_alike() -> None:
    one, two = run_ranks(2, _decided)
    assert one == two
    go_on, save = Decision(False, ""), Decision(True, "")
    failed = Decision(False, "", failed=True)
    assert one == [go_on, Decision(False, "SIGUSR1"), go_on, save, go_on, Decision(True, "train.time_limit"), failed]
