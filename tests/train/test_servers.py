"""A run with a server without a model, started by the launcher, that dies and comes back: losses of homes alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from distca.log import MISTAKE
from distca.testing.ranks import run_ranks
from tests.testing.programs import Program
from tests.train.small_runs import ROOT, arguments, steps_of, train_all, write_texts

HOMES = 2
STEPS = 4
PATIENCE_S = 120.0
LAUNCHER = f"""
import sys
from distca.train.launch import machines, pretrain, say
machines._CPU_RANKS = {HOMES}
say.leave(lambda: pretrain.launch(sys.argv[1:]))
"""
"""pretrain_llama.sh with fewer CPU ranks, as each imports for seconds."""


def _wait_for(run: subprocess.Popen[bytes], happened: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not happened():
        assert run.poll() is None and time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.slow
def test_losses_are_those_of_homes_alone_when_the_server_is_killed_and_comes_back(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    settings = {"train__steps": 1000, "optimizer__schedule": "constant", "log__memory": True}
    line = arguments(output=tmp_path, data__path=tmp_path / "texts", **settings)
    alone = [*line, "--name", "alone", "--train.steps", str(STEPS)]
    run_ranks(HOMES, train_all, [alone])  # first: with what it imports, servers that come later are there at once
    of_servers = ["--cad.speeds", "[1,1,0.5]", "--log.timeline_steps", "[1,2]"]
    command = [sys.executable, "-c", LAUNCHER, *line, "--name", "pool", *of_servers]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = os.environ | {"SERVERS": "1", "GPUS_PER_NODE": "0", "PYTHONPATH": paths}
    metrics, said = tmp_path / "pool" / "metrics.jsonl", tmp_path / "said"

    def done() -> int:
        return metrics.read_text().count("\n") if metrics.exists() else 0

    with said.open("w") as log, subprocess.Popen(command, env=variables, stderr=log) as run:
        _wait_for(run, lambda: done() >= 2)
        processes = psutil.Process(run.pid).children(recursive=True)
        server = next(each for each in processes if each.environ().get("SERVER") and not each.children())
        again = server.cmdline(), server.environ()
        server.kill()
        killed, before = time.monotonic(), done()
        _wait_for(run, lambda: done() > before + 2)
        assert time.monotonic() - killed < 20
        comer = Program(*again)
        _wait_for(run, lambda: "server 0 is there" in said.read_text())
        before = done()
        with (tmp_path / "twin").open("w") as of_twin:
            twin = Program(*again, stderr=of_twin)
        assert twin.wait(60) == MISTAKE and "have a server 0 already" in (tmp_path / "twin").read_text()
        _wait_for(run, lambda: done() > before + 1)
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 0 and comer.wait(30) == 0
    assert "server 0 is gone; the run goes on" in said.read_text()
    assert "Warning" not in said.read_text(), "warnings that a user can do nothing about"
    assert not psutil.wait_procs(processes, timeout=30)[1]
    together, expected = steps_of(tmp_path / "pool"), steps_of(tmp_path / "alone")
    assert {step: together[step] for step in expected} == pytest.approx(expected, rel=1e-5)
    assert steps_of(tmp_path / "pool", "server_resident_memory_gb")[1] > 0.05  # type: ignore[operator]
    served = [len(each) for each in steps_of(tmp_path / "pool", "attention_s").values()]  # type: ignore[arg-type]
    assert served[0] == served[-1] == HOMES + 1 and HOMES in served
    events = json.loads((tmp_path / "pool" / "timeline.json").read_text())["traceEvents"]
    (of_server,) = {each["pid"] for each in events if each.get("args", {}).get("name") == "server 0"}
    spans = [each for each in events if each["pid"] == of_server and each["ph"] == "X"]
    assert sum(each["name"].startswith("serve") for each in spans) > 4
    of_homes = [each for each in events if each["pid"] < of_server and each["ph"] == "X"]
    first, last = min(each["ts"] for each in of_homes), max(each["ts"] + each["dur"] for each in of_homes)
    assert all(first <= each["ts"] <= last for each in spans)
