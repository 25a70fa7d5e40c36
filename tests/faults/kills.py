"""Runs that save after every step are killed at random moments of a save, and resumed, again and again.

    python -m tests.faults.kills --kills 200 --seed 1 --output benchmarks/results/kills.json

After every kill each checkpoint that was finished before must still be there and intact, unless newer ones replaced it,
and the finished run must have the losses of one that nobody killed, bit for bit. pytest does not collect this.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from rich.progress import Progress

from distca.testing.ranks import RankFailure, preload, run_ranks
from distca.train.checkpoint.integrity import check_contents
from distca.train.run.run_folder import RunFolder
from distca.versions import header, write_report
from tests.train.small_runs import arguments, steps_of, train_all, write_texts

RANKS, STEPS, KEPT = 2, 40, 2
_PATIENCE_S = 180.0


class _Start:
    """A start of a run, on ranks that are forked from a process that has imported everything."""

    def __init__(self, line: list[str]) -> None:
        self.failure: RankFailure | None = None
        self._thread = threading.Thread(target=self._train, args=(line,), daemon=True)
        self._thread.start()

    def _train(self, line: list[str]) -> None:
        try:
            run_ranks(RANKS, train_all, [line], timeout=_PATIENCE_S)
        except RankFailure as error:
            self.failure = error

    def is_alive(self) -> bool:
        """Whether ranks run."""
        return self._thread.is_alive()

    def kill(self, randomly: random.Random) -> None:
        """End all ranks as a node without power does: each at a moment of its own, none with a word."""
        ranks = _ranks()
        randomly.shuffle(ranks)
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
            if randomly.random() < 0.3:
                time.sleep(randomly.uniform(0, 0.02))
        self._thread.join()


def _ranks() -> list[int]:
    """Children of the process that ranks are forked from."""
    return [child.pid for helper in psutil.Process().children() for child in helper.children()]


def _finished(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in RunFolder(run).checkpoints()]


def _wait_for_a_save(run: Path, start: _Start, more: int) -> bool:
    """Wait until a checkpoint is begun, ``more`` after what there is; False where the run ended before."""
    newest = max(_finished(run), default=0)
    end = time.monotonic() + _PATIENCE_S
    while start.is_alive() and time.monotonic() < end:
        if RunFolder(run).checkpoint_path(newest + more).exists():
            return True
        time.sleep(0.001)
    assert not start.is_alive(), "the run neither saves nor ends"
    return False


def _kills(folder: Path, randomly: random.Random) -> Iterator[dict[str, Any]]:
    """Kill and resume without end; what was seen of every kill."""
    reference = arguments(output=folder, name="reference", data__path=folder / "texts", train__steps=STEPS)
    run_ranks(RANKS, train_all, [reference], timeout=_PATIENCE_S)
    expected = steps_of(folder / "reference")
    number = 0
    while True:
        number += 1
        run = folder / f"run{number}"
        settings: dict[str, Any] = {"name": run.name, "output": folder, "data__path": folder / "texts"}
        settings |= {"checkpoint__save_every": 1, "checkpoint__keep": KEPT, "checkpoint__resume": "auto"}
        line = arguments(**settings, train__steps=STEPS)
        for _ in range(1000):
            before = _finished(run)
            start = _Start(line)
            # Killed before its first checkpoint is there, a run begins anew in another folder.
            if not _wait_for_a_save(run, start, randomly.randint(1 if before else 2, 3)):
                assert start.failure is None, f"{run} could not go on after a kill: {start.failure}"
                break
            time.sleep(randomly.choice([0.0, randomly.uniform(0, 0.1), randomly.uniform(0, 0.5)]))
            start.kill(randomly)
            after = _finished(run)
            lost = [step for step in before if step not in after and sum(each > step for each in after) < KEPT]
            assert not lost, f"{run}: finished checkpoints {lost} are lost; {before} before, {after} after the kill"
            for checkpoint in RunFolder(run).checkpoints():
                check_contents(checkpoint.path)
            unfinished = len(RunFolder(run).checkpoint_folders()) - len(after)
            yield {"run": number, "newest": max(after, default=0), "in_a_save": bool(unfinished)}
        found = steps_of(run)
        other = {step: (found.get(step), loss) for step, loss in expected.items() if found.get(step) != loss}
        assert not other, f"{run} has other losses than a run that nobody killed: {other}"


def main() -> None:
    """Kill as often as asked; the JSON is written after every kill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    preload("distca.train.run.main", "distca.train.run.loop", "distca.train.run.builder")
    began, seen = time.monotonic(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="distca-kills-") as name, Progress() as progress:
        folder = Path(name)
        write_texts(folder / "texts")
        bar = progress.add_task("kills", total=asked.kills)
        for kill in _kills(folder, random.Random(asked.seed)):
            seen.append(kill)
            progress.advance(bar)
            report = {
                **header(f"python -m tests.faults.kills --kills {asked.kills} --seed {asked.seed}", RANKS),
                "kills": len(seen),
                "in_a_save": sum(each["in_a_save"] for each in seen),
                "runs_that_ended": seen[-1]["run"] - 1,
                "lost_checkpoints": 0,
                "runs_with_other_losses": 0,
                "seconds": round(time.monotonic() - began, 1),
            }
            if asked.output:
                write_report(asked.output, report)
            if len(seen) == asked.kills:
                break
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
