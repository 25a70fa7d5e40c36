"""A run with a server without a model that dies and comes back: losses of homes alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from unittest.mock import patch

import psutil
import pytest

from distca.log import MISTAKE
from distca.testing.ranks import run_ranks
from distca.train.config.environment import settings
from distca.train.config.variable import Launcher
from distca.train.launch import machines, start
from tests.testing.programs import PIDS, Program
from tests.train.small_runs import ROOT, arguments, steps_of, train_all, write_texts

HOMES = 2
STEPS = 4
PATIENCE_S = 120.0
VARIABLES = {"SERVERS": "1", "GPUS_PER_NODE": "0"}
LAUNCHER = f"""
import sys
from distca.train.launch import machines, pretrain, say
machines._CPU_RANKS = {HOMES}
say.leave(lambda: pretrain.launch(sys.argv[1:]))
"""
"""pretrain_llama.sh with fewer CPU ranks, as each imports for seconds."""


@dataclass
class Pool:
    """Homes and a server that run.

    Attributes:
        run: what ends with the homes' exit code.
        processes: gives all processes.
        server: which of them is the server.
        again: gives the server's words and variables.
        stop: tells the homes to save and end.
    """

    run: subprocess.Popen[bytes] | Program
    processes: Callable[[], list[psutil.Process]]
    server: Callable[[psutil.Process], bool]
    again: Callable[[psutil.Process], tuple[list[str], dict[str, str]]]
    stop: Callable[[], None]


def _launched(line: list[str], environment: dict[str, str], folder: Path, log: IO[str]) -> Pool:
    """As a user starts them."""
    run = subprocess.Popen([sys.executable, "-c", LAUNCHER, *line], env=environment | VARIABLES, stderr=log)
    return Pool(
        run,
        lambda: psutil.Process(run.pid).children(recursive=True),
        lambda each: bool(each.environ().get("SERVER")) and not each.children(),
        lambda each: (each.cmdline(), each.environ()),
        lambda: run.send_signal(signal.SIGTERM),
    )


def _forked(line: list[str], environment: dict[str, str], folder: Path, log: IO[str]) -> Pool:
    """By the launcher's words, in processes that need not import for seconds."""
    told = ["--config", str(ROOT / "configs" / "tiny.yaml"), *settings(Launcher.TRAINING, VARIABLES), *line]
    with patch.object(machines, "_CPU_RANKS", HOMES):
        found = machines.find_machines(Launcher.TRAINING, VARIABLES, environment)
        homes = start.command(found, sys.executable, [str(ROOT / "pretrain_llama.py"), *told], environment)
        servers = start.servers_command(found, sys.executable, environment)
    homes, of_homes = _split(homes)
    words, of_server = _split(servers)
    again = words[-3:], environment | of_server | {"SERVER": "0", "LOCAL_RANK": words[-5]}
    pids = folder / "pids"
    pids.mkdir()
    run = Program(homes, environment | of_homes | {PIDS: str(pids)}, stderr=log)
    server = Program(*again, stderr=log)

    def ranks() -> list[psutil.Process]:
        return [psutil.Process(int(each.read_text())) for each in pids.iterdir()]

    def stop() -> None:
        for each in ranks():
            each.send_signal(signal.SIGTERM)

    return Pool(
        run, lambda: [*ranks(), psutil.Process(server.pid)], lambda each: each.pid == server.pid, lambda _: again, stop
    )


def _split(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """A program, and the variables that ``env`` before it sets."""
    place = words.index(sys.executable)
    return words[place:], dict(word.split("=", 1) for word in words[1:place])


def _wait_for(run: subprocess.Popen[bytes] | Program, happened: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not happened():
        assert run.poll() is None and time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("begin", [_forked, pytest.param(_launched, marks=pytest.mark.matrix)])
def test_losses_are_those_of_homes_alone_when_the_server_is_killed_and_comes_back(
    tmp_path: Path, begin: Callable[[list[str], dict[str, str], Path, IO[str]], Pool]
) -> None:
    write_texts(tmp_path / "texts")
    own = {"train__steps": 1000, "optimizer__schedule": "constant", "log__memory": True}
    line = arguments(output=tmp_path, data__path=tmp_path / "texts", **own)
    alone = [*line, "--name", "alone", "--train.steps", str(STEPS)]
    run_ranks(HOMES, train_all, [alone])  # first: with what it imports, servers that come later are there at once
    of_servers = ["--cad.speeds", "[1,1,0.5]", "--log.timeline_steps", "[1,2]"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    metrics, said = tmp_path / "pool" / "metrics.jsonl", tmp_path / "said"

    def done() -> int:
        return metrics.read_text().count("\n") if metrics.exists() else 0

    with said.open("w") as log:
        pool = begin([*line, "--name", "pool", *of_servers], os.environ | {"PYTHONPATH": paths}, tmp_path, log)
        run = pool.run
        _wait_for(run, lambda: done() >= 2)
        processes = pool.processes()
        server = next(each for each in processes if pool.server(each))
        again = pool.again(server)
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
        pool.stop()
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
