"""Signals to pretrain_llama.sh: which end the ranks, which let them save, and what is said."""

import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest

from distca.train.launch import pretrain, start
from distca.train.launch.machines import Machines
from distca.train.run.stopping import say_finished
from tests.train.launch.machine import SCRIPT, Machine

# It runs until it is told to end, and then ends as torchrun does; after a while by itself, so that none is left over.
STAYS = """#!/bin/bash
trap 'echo told >> "$RECORD"; exit 1' TERM
echo up > "$RECORD"
for _ in {1..4000}; do sleep 0.05; done
"""


def _started(machine: Machine, number: int) -> subprocess.Popen[str]:
    """The script, as it runs and hears of a signal."""
    return subprocess.Popen(
        ["bash", str(SCRIPT)],
        env=machine.variables,
        cwd=machine.folder,
        stderr=subprocess.PIPE,
        text=True,
        # Bash cannot trap what was ignored when it started, as it is where the tests run in the background.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_ends_the_ranks_and_is_named(machine: Machine, number: int, name: str) -> None:
    machine.tool("torchrun", STAYS)
    script = _started(machine, number)
    try:
        end = time.monotonic() + 100
        while not (machine.record.exists() and machine.record.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        script.send_signal(number)
        said = script.communicate(timeout=100)[1].splitlines()
    finally:
        script.kill()
    assert machine.record.read_text().split() == ["up", "told"]
    assert script.returncode == 128 + number
    assert said[-2] == f"error: The run was stopped by {name}."
    assert said[-1].startswith("next step: RESUME=auto goes on from the last checkpoint")
    assert not [line for line in said if "ended early" in line]


def test_ranks_end_when_the_launcher_is_killed(machine: Machine) -> None:
    machine.tool("torchrun", STAYS)
    script = _started(machine, signal.SIGTERM)
    try:
        end = time.monotonic() + 100
        while not (machine.record.exists() and machine.record.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        script.kill()
        while "told" not in machine.record.read_text() and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        script.kill()
        script.communicate()
    assert machine.record.read_text().split() == ["up", "told"]


# Ranks that save when they are told to, below what started them, and that begin to listen to SIGUSR1 late.
SAVES = f"""#!/bin/bash
RANK=0 {sys.executable} -c '
import os, signal, sys, time
def save(*_):
    print("saved", file=record, flush=True)
    sys.exit()
record = open(os.environ["RECORD"], "a")
signal.signal(signal.SIGTERM, save)
print("up", file=record, flush=True)
time.sleep(1)
signal.signal(signal.SIGUSR1, save)
time.sleep(90)' &
trap 'echo the starter was told >> "$RECORD"' TERM
wait
"""


@pytest.mark.parametrize(
    "number,early,requeued",
    [(signal.SIGUSR1, False, True), (signal.SIGUSR1, True, True), (signal.SIGTERM, False, False)],
)
def test_ranks_are_told_to_save_and_a_job_whose_time_is_over_is_requeued(
    machine: Machine, number: int, early: bool, requeued: bool
) -> None:
    """torchrun itself would end them half a minute later. At preemption and scancel nothing is requeued by us. The
    signal is not lost while settings are checked, before there are any ranks."""
    machine.slurm(1, 0)
    machine.tool("srun", SAVES)
    machine.requeues()
    checking = machine.folder / "checking"
    if early:
        slow = f"[[ $2 == --check ]] && touch {checking} && sleep 1"
        python = machine.bin.joinpath("python").read_text()
        machine.tool("python", python.replace("#!/bin/bash", f"#!/bin/bash\n{slow}"))
    script = _started(machine, number)
    try:
        end = time.monotonic() + 100
        while not (checking if early else machine.record).exists() and time.monotonic() < end:
            time.sleep(0.05)
        script.send_signal(number)
        said = script.communicate(timeout=100)[1]
    finally:
        script.kill()
    assert script.returncode == 0, said
    assert machine.record.read_text().splitlines() == ["up", "saved"] + ["requeue 20017"] * requeued
    assert ("Slurm starts job 20017 again." in said) == requeued


@pytest.mark.parametrize("over", [False, True])
def test_a_job_is_not_queued_again_once_all_its_steps_are_done(over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[str] = []

    def run(ranks: start.Ranks) -> start.Ranks:
        ranks.asked_to_save = True
        if over:
            say_finished()
        return ranks

    monkeypatch.setattr(start.Ranks, "run", run)
    monkeypatch.setattr(pretrain, "_requeue", queued.append)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv(start.FINISHED, "")
    machines = Machines("srun", nodes=1, gpus=0, node=0, first="", port="")
    assert pretrain._run([], [], {}, machines) == 0 and queued == ["7"] * (not over)


@pytest.mark.parametrize("second, ends", [(signal.SIGUSR1, 0), (signal.SIGTERM, 1)])
def test_a_job_whose_time_is_over_may_be_told_twice(second: int, ends: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that save go on saving when SIGUSR1 follows; a second SIGTERM ends them."""
    told: list[int] = []
    monkeypatch.setattr(start, "_tell_ranks", lambda _, number: told.append(number) or True)
    ranks = start.Ranks(["true"])
    ranks._process = Mock(pid=0)
    ranks._stop(signal.SIGTERM, None)
    ranks._stop(second, None)
    assert ranks._process.terminate.call_count == ends
    assert told == [signal.SIGTERM, signal.SIGUSR1][: 2 - ends]
