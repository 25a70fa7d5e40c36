"""A rank that dies ends all others, quickly and with a sentence."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from distca.cluster.health import Companions
from distca.testing.ranks import run_ranks
from tests.train.small_runs import ROOT, arguments, write_texts

pytestmark = pytest.mark.slow


def _start(folder: Path, *line: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, str(ROOT / "pretrain_llama.py"), *line],
        env=os.environ | environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("w"),
        text=True,
    )


def test_a_killed_stage_ends_all_ranks_with_a_sentence(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    settings = {"output": tmp_path, "data__path": tmp_path / "texts", "model__layers": 4, "parallel__pp": 4}
    settings |= {"name": "killed", "train__steps": 10_000, "train__micro_batches": 2}
    started = _start(tmp_path, *arguments(**settings))
    try:
        metrics = tmp_path / "killed" / "metrics.jsonl"
        end = time.monotonic() + 90
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            assert started.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.2)
        ranks = psutil.Process(started.pid).children()
        victim = next(rank for rank in ranks if rank.environ()["RANK"] == "2")
        victim.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        assert started.wait(60) != 0
        assert time.monotonic() - killed < 30
    finally:
        if started.poll() is None:
            started.kill()
    log = (tmp_path / "log").read_text()
    said = re.findall(r"Rank 2 died in step (\d+) \(process (\d+) on [^)]*\)", log)
    assert len(said) == 1, log
    steps = metrics.read_text().count("\n")
    assert steps <= int(said[0][0]) <= steps + 1 and int(said[0][1]) == victim.pid
    assert "RESUME=latest" in log
    assert 'pretrain_llama.py", line' not in log, "a trace of a rank that only waited"
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


def _find_one_death_twice() -> list[str]:
    """What happens first where two threads find it, and the words take a while."""
    happened: list[str] = []

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            time.sleep(0.3)
            happened.append("said" if "Rank 1 died" in record.getMessage() else record.getMessage())

    def give_up(code: int) -> None:
        happened.append("ended")
        raise SystemExit(code)

    logging.getLogger().addHandler(Slow())
    companions = Companions(give_up)
    companions._stop.set()
    companions._processes = {1: (2**22 + 1, 0.0)}  # more than any process number
    threads = [threading.Thread(target=companions.explain_failure) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    return happened


def test_who_speaks_is_not_ended_by_its_other_thread() -> None:
    assert run_ranks(1, _find_one_death_twice)[0] == ["said", "ended", "ended"]
