"""What runs do under a real Slurm: started by run.sh, which sets one up; writes a JSON of what was seen and how long.

A scenario that does not end as it should is an AssertionError in the JSON, and exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from rich.progress import track

from distca.versions import header, write_report
from tests.train.small_runs import ROOT, arguments, steps_of, write_texts

SCRIPT = str(ROOT / "pretrain_llama.sh")
CPU_RANKS = ["--gpus-per-node=0", "--ntasks-per-node=4"]
PATIENCE_S = 600.0


class Slurm:
    """Jobs of this test's Slurm.

    Args:
        folder: of the runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def submit(self, name: str, *options: str, nodes: int = 1, **settings: Any) -> str:
        """Number of a batch job that trains the run ``name``."""
        line = self.settings(name, **settings)
        words = ["sbatch", "--parsable", f"--nodes={nodes}", *CPU_RANKS, f"--output={self.log(name)}", *options, SCRIPT]
        return _output(*words, *line).strip()

    def settings(self, name: str, **settings: Any) -> list[str]:
        chosen = {"output": self.folder, "data__path": self.folder / "texts", "name": name} | settings
        return arguments(**chosen)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def run(self, name: str) -> Path:
        return self.folder / name

    def state(self, job: str) -> dict[str, str]:
        """What scontrol says of a job."""
        return dict(re.findall(r"(\w+)=(\S+)", _output("scontrol", "show", "job", "--oneliner", job)))

    def wait_for(self, job: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of some states; a requeued one is started at once."""

        def reached() -> dict[str, str] | None:
            found = self.state(job)
            if found["JobState"] == "PENDING" and found.get("Reason") == "BeginTime":
                subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], capture_output=True)
            return found if found["JobState"] in states else None

        return _wait(reached, lambda: f"{self.state(job)}\n{_tail(self.log_of(job))}")

    def log_of(self, job: str) -> Path:
        return Path(self.state(job).get("StdOut", "/dev/null"))

    def wait_for_step(self, name: str, step: int, job: str) -> None:
        """Wait until a run has done a step."""

        def done() -> bool:
            with suppress(OSError, ValueError):
                return max(steps_of(self.run(name)), default=0) >= step
            return False

        _wait(done, lambda: f"{self.state(job)}\n{_tail(self.log(name))}")


def _wait(happened: Callable[[], Any], instead: Callable[[], str]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if found := happened():
            return found
        time.sleep(0.5)
    raise AssertionError(f"Nothing happened for {PATIENCE_S:.0f} s: {instead()}")


def _output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-30:]) if path.is_file() else f"no {path}"


def sbatch(slurm: Slurm) -> dict[str, Any]:
    """Two nodes of four ranks train and end well."""
    job = slurm.submit("sbatch", nodes=2, train__steps=3)
    ended = slurm.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
    said = slurm.log("sbatch").read_text()
    assert ended["JobState"] == "COMPLETED" and "Starting 8 CPU ranks on 2 nodes through srun" in said, said
    return {"steps": len(steps_of(slurm.run("sbatch"))), "exit_code": ended["ExitCode"]}


def salloc(slurm: Slurm) -> dict[str, Any]:
    """The script inside an allocation trains on its nodes."""
    words = ["salloc", "--nodes=1", "--ntasks-per-node=4", "bash", SCRIPT]
    done = subprocess.run(
        [*words, *slurm.settings("salloc", train__steps=3)],
        env=os.environ | {"GPUS_PER_NODE": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return {"steps": len(steps_of(slurm.run("salloc")))}


def srun(slurm: Slurm) -> dict[str, Any]:
    """srun without the launcher is refused by a sentence, not trained four times."""
    words = ["srun", "--nodes=1", "--ntasks=4", sys.executable, str(ROOT / "pretrain_llama.py")]
    done = subprocess.run([*words, *slurm.settings("srun")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "Slurm has 4 tasks for this, but WORLD_SIZE is not set" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not slurm.run("srun").exists()
    return {"exit_code": done.returncode}


def rank_logs(slurm: Slurm) -> dict[str, Any]:
    """With a log of each rank, every one says why the run ended when a rank is killed."""
    os.environ["SLURM_STDERRMODE"] = str(slurm.folder / "rank-%t.log")
    try:
        job = slurm.submit("logs", "--no-requeue", train__steps=10_000)
        slurm.wait_for_step("logs", 2, job)
        _rank_of(slurm.run("logs"), 2).send_signal(signal.SIGKILL)
        began = time.monotonic()
        slurm.wait_for(job, "FAILED")
    finally:
        del os.environ["SLURM_STDERRMODE"]
    said = {rank: (slurm.folder / f"rank-{rank}.log").read_text() for rank in (0, 1, 3)}
    assert all("Rank 2 died in step" in words for words in said.values()), said
    return {"seconds_to_the_end_of_the_job": round(time.monotonic() - began, 1)}


def _rank_of(run: Path, rank: int) -> psutil.Process:
    """The process of a rank that trains a run."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            ours = str(run.name) in words and "pretrain_llama.py" in " ".join(words) and "--check" not in words
            if ours and "python" in words[0] and process.environ().get("RANK") == str(rank):
                return process
    raise AssertionError(f"rank {rank} of {run} runs nowhere")


def scancel(slurm: Slurm) -> dict[str, Any]:
    """A cancelled job saves the step it was in and is not requeued."""
    job = slurm.submit("scancel", train__steps=10_000)
    slurm.wait_for_step("scancel", 2, job)
    began = time.monotonic()
    _output("scancel", job)
    slurm.wait_for(job, "CANCELLED")
    _wait(lambda: "Ended by SIGTERM" in slurm.log("scancel").read_text(), lambda: _tail(slurm.log("scancel")))
    _wait(lambda: list(slurm.run("scancel").glob("checkpoints/*/COMPLETE")), lambda: _tail(slurm.log("scancel")))
    assert slurm.state(job)["Restarts"] == "0"
    return {"seconds_to_the_end_of_the_job": round(time.monotonic() - began, 1)}


def preemption(slurm: Slurm) -> dict[str, Any]:
    """A job of a partition with priority takes both nodes; the other one saves, is requeued and ends as if alone."""
    steps = 200
    job = slurm.submit("preempted", nodes=2, train__steps=steps)
    slurm.wait_for_step("preempted", 3, job)
    began = time.monotonic()
    words = ["sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"]
    first = _output(*words, "--wrap", "sleep 5").strip()
    slurm.wait_for(first, "COMPLETED")
    away = time.monotonic() - began
    ended = slurm.wait_for(job, "COMPLETED", "FAILED", "CANCELLED")
    said = slurm.log("preempted").read_text()
    assert ended["JobState"] == "COMPLETED" and int(ended["Restarts"]) >= 1 and "Ended by SIG" in said, said
    return {
        "restarts": int(ended["Restarts"]),
        "seconds_until_the_other_had_run": round(away, 1),
        "losses": _against_alone(slurm, "preempted", steps),
    }


def node_failure(slurm: Slurm) -> dict[str, Any]:
    """A node's daemon dies; Slurm requeues the job, which goes on from its last checkpoint."""
    steps = 200
    job = slurm.submit("failed", nodes=2, train__steps=steps, checkpoint__save_every=10)
    slurm.wait_for_step("failed", 5, job)
    began = time.monotonic()
    daemon = _daemon("n1")
    start = daemon.cmdline()
    daemon.kill()
    _wait(
        lambda: int(slurm.state(job)["Restarts"]) or slurm.state(job)["JobState"] != "RUNNING",
        lambda: _tail(slurm.log("failed")),
    )
    seconds = time.monotonic() - began
    subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ended = slurm.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
    said = slurm.log("failed").read_text()
    assert ended["JobState"] == "COMPLETED", (ended, said)
    assert "Resumed from" in said, said
    return {
        "restarts": int(ended["Restarts"]),
        "seconds_until_slurm_knew": round(seconds, 1),
        "losses": _against_alone(slurm, "failed", steps),
    }


def _daemon(node: str) -> psutil.Process:
    """Slurm's daemon of a node."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline()[:1] == ["slurmd"] and node in process.cmdline():
                return process
    raise AssertionError(f"{node} has no slurmd")


def _against_alone(slurm: Slurm, name: str, steps: int) -> str:
    """Compare a run's losses on two nodes with those of one that nothing happens to."""
    if not slurm.run("alone").exists():
        slurm.wait_for(slurm.submit("alone", nodes=2, train__steps=steps), "COMPLETED")
    assert steps_of(slurm.run(name)) == steps_of(slurm.run("alone")), "losses differ"
    return "bitwise"


def node_death(slurm: Slurm) -> dict[str, Any]:
    """A node dies with all that runs there: the other node's ranks end, srun waits for the dead one's until Slurm knows
    of it, and Slurm requeues the job. A PID namespace stands for the node."""
    steps, daemon = 200, _daemon("n1")
    start, quiet = daemon.cmdline(), {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    daemon.terminate()
    daemon.wait(30)
    node = subprocess.Popen(["unshare", "--fork", "--pid", "--mount-proc", "--kill-child", *start], **quiet)
    try:
        job = slurm.submit("dead", nodes=2, train__steps=steps, checkpoint__save_every=10)
        slurm.wait_for_step("dead", 15, job)
        began = time.monotonic()
        node.kill()
        log = slurm.log("dead")
        _wait(lambda: "n0: task" in log.read_text(), lambda: _tail(log))
        ended_after = time.monotonic() - began
        _wait(lambda: int(slurm.state(job)["Restarts"]), lambda: _tail(log))
        known_after = time.monotonic() - began
        time.sleep(75)  # no node is back at once; Slurm would end the job again, when it repeats what n1 did not hear
    finally:
        subprocess.Popen(start, **quiet)
    ended = slurm.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
    said = log.read_text()
    assert ended["JobState"] == "COMPLETED" and "Resumed from" in said, (ended, said)
    return {
        "restarts": int(ended["Restarts"]),
        "seconds_until_the_other_nodes_ranks_had_ended": round(ended_after, 1),
        "seconds_until_slurm_knew": round(known_after, 1),
        "losses": _against_alone(slurm, "dead", steps),
    }


def ten_requeues(slurm: Slurm) -> dict[str, Any]:
    """At the signal of sbatch's --signal a run saves and is requeued; after ten times its losses are as without."""
    steps = 300
    job = slurm.submit("requeued", train__steps=steps)
    done = 0
    for number in range(10):
        slurm.wait_for(job, "RUNNING")
        slurm.wait_for_step("requeued", done + 2, job)  # Slurm drops a signal to a batch script that it is starting
        _output("scancel", "--batch", "--signal=USR1", job)
        _wait(lambda: int(slurm.state(job)["Restarts"]) > number, lambda: _tail(slurm.log("requeued")))  # noqa: B023
        done = max(steps_of(slurm.run("requeued")))
    ended = slurm.wait_for(job, "COMPLETED", "FAILED", "CANCELLED")
    assert ended["JobState"] == "COMPLETED" and ended["Restarts"] == "10", (ended, _tail(slurm.log("requeued")))
    alone = slurm.submit("at once", train__steps=steps)
    slurm.wait_for(alone, "COMPLETED")
    assert steps_of(slurm.run("requeued")) == steps_of(slurm.run("at once")), "losses differ"
    return {"restarts": 10, "losses": "bitwise"}


SCENARIOS = (sbatch, salloc, srun, rank_logs, scancel, preemption, node_failure, node_death, ten_requeues)


def main() -> None:
    """Run all scenarios, or some."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="+", choices=[each.__name__ for each in SCENARIOS])
    asked = parser.parse_args()
    write_texts(asked.folder / "texts")
    slurm, results = Slurm(asked.folder), dict[str, Any]()
    chosen = [each for each in SCENARIOS if not asked.only or each.__name__ in asked.only]
    command = " ".join(["bash tests/slurm/run.sh", *(["--only", *asked.only] if asked.only else [])])
    report = {**header(command, 8), "slurm": _output("sinfo", "--version").strip(), "nodes": 2, "scenarios": results}
    for scenario in track(chosen, "Slurm"):
        began = time.monotonic()
        try:
            found = scenario(slurm)
        except Exception:
            found = {"failed": traceback.format_exc()}
        results[scenario.__name__] = found | {"seconds": round(time.monotonic() - began, 1)}
        sys.stderr.write(f"{scenario.__name__}: {json.dumps(results[scenario.__name__], indent=1)}\n")
        subprocess.run(["scancel", "--full", "--user=root"])
        if asked.output:
            write_report(asked.output, report)
    sys.exit(any("failed" in found for found in results.values()))


if __name__ == "__main__":
    main()
