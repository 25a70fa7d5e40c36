"""A run with a server without a model, started by the launcher: losses of homes alone, and its death ends all."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from distca.testing.ranks import run_ranks
from tests.train.small_runs import ROOT, arguments, steps_of, train_all, write_texts

STEPS = 4


@pytest.mark.slow
def test_losses_are_those_of_homes_alone_until_a_server_is_killed(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    settings = {"train__steps": 1000, "optimizer__schedule": "constant", "log__memory": True}
    line = arguments(output=tmp_path, data__path=tmp_path / "texts", **settings)
    command = ["bash", str(ROOT / "pretrain_llama.sh"), *line, "--name", "pool", "--cad.speeds", "[1,1,1,1,0.5]"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = os.environ | {"SERVERS": "1", "GPUS_PER_NODE": "0", "PYTHONPATH": paths}
    with (tmp_path / "said").open("w") as said, subprocess.Popen(command, env=variables, stderr=said) as run:
        metrics, until = tmp_path / "pool" / "metrics.jsonl", time.monotonic() + 120
        while run.poll() is None and time.monotonic() < until:
            if metrics.exists() and metrics.read_text().count("\n") > STEPS:
                break
            time.sleep(0.2)
        processes = psutil.Process(run.pid).children(recursive=True)
        server = next(each for each in processes if each.environ().get("SERVER") and not each.children())
        server.kill()
        killed = time.monotonic()
        assert run.wait(60) == 1
        assert time.monotonic() - killed < 20
    what = (tmp_path / "said").read_text()
    assert "Server 0 died in step " in what
    assert "Warning" not in what, "warnings that a user can do nothing about"
    assert not psutil.wait_procs(processes, timeout=5)[1]
    alone = [*line, "--name", "alone", "--train.steps", str(STEPS)]
    run_ranks(4, train_all, [alone])
    together, expected = steps_of(tmp_path / "pool"), steps_of(tmp_path / "alone")
    assert {step: together[step] for step in expected} == pytest.approx(expected, rel=1e-5)
    assert all(taken > 0.05 for taken in steps_of(tmp_path / "pool", "server_resident_memory_gb").values())
    served = steps_of(tmp_path / "pool", "attention_s")
    assert all(len(seconds) == 5 for seconds in served.values())  # type: ignore[arg-type]
