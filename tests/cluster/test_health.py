"""A rank that dies ends all others, quickly and with a sentence."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch.distributed as dist

from distca import log
from distca.cluster import board, failure_reports, health, process
from distca.cluster.health import Health
from distca.cluster.members import Members
from distca.cluster.pool_store import PoolStore
from distca.cluster.process import Member, Process
from distca.errors import ConfigError
from distca.testing.ranks import run_ranks
from tests.testing.programs import PIDS, Program
from tests.train.small_runs import ROOT, arguments, write_texts

pytestmark = pytest.mark.slow

Answers = dict[tuple[Any, ...], Future[list[Any]]]
"""What ranks will have answered, by their function and its arguments."""


@pytest.fixture(scope="module")
def answers() -> Iterator[Answers]:
    """Ranks that wait for most of their time, all at the same time."""
    stores = {(_lose_the_store, server): 1 for server in (False, True)}
    servers = {(_lose_a_server, space): 1 for space in (None, "another")}
    runs = {(_lose_a_node,): 2, (_refuse_alike,): 2, **stores, **servers}
    with ThreadPoolExecutor(len(runs)) as threads:
        yield {what: threads.submit(run_ranks, ranks, *what) for what, ranks in runs.items()}


def test_a_killed_stage_ends_all_ranks_with_a_sentence(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    settings = {"output": tmp_path, "data__path": tmp_path / "texts", "model__layers": 3, "parallel__pp": 3}
    settings |= {"name": "killed", "train__steps": 10_000, "train__micro_batches": 2}
    pids = tmp_path / "pids"
    pids.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3", "pretrain_llama.py"]
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), PIDS: str(pids)}
    with (tmp_path / "log").open("w") as file:
        started = Program([*command, *arguments(**settings)], os.environ | environment, ROOT, file, file)
    try:
        metrics = tmp_path / "killed" / "metrics.jsonl"
        end = time.monotonic() + 90
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            assert started.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.2)
        ranks = [psutil.Process(int((pids / str(rank)).read_text())) for rank in range(3)]
        victim = ranks[2]  # whom rank 0 does not talk to
        victim.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        assert started.wait(60) != 0
        assert time.monotonic() - killed < health._LOST_S, "nobody waited until the rank counted as lost"
    finally:
        started.terminate()
    text = (tmp_path / "log").read_text()
    said = re.findall(r"Rank 2 died in step (\d+) \(process (\d+) on [^)]*\)", text)
    assert len(said) == 2, text  # by each of the others
    steps = metrics.read_text().count("\n")
    assert steps <= int(said[0][0]) <= steps + 1 and int(said[0][1]) == victim.pid
    assert "last checkpoint" in text
    # torchrun tells the others to end, because one died: they must not try to save.
    assert not (tmp_path / "killed" / "checkpoints").exists() and "Ended by" not in text
    assert 'pretrain_llama.py", line' not in text, "a trace of a rank that only waited"
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
    watching = Health(give_up=give_up)
    watching._stop.set()
    watching._processes = {1: replace(Process.here(), pid=2**22 + 1)}  # more than any process number
    threads = [threading.Thread(target=watching.fail, args=(RuntimeError("late"),)) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    return happened


def test_who_speaks_is_not_ended_by_its_other_thread() -> None:
    assert run_ranks(1, _find_one_death_twice)[0] == ["said", "ended", "said", "ended"]


def _lose_a_server(space: str | None) -> list[tuple[int, list[str]]]:
    """Codes and words of a home that loses server 1 before the pool has formed, and after. It was on the home's
    machine, or on the one named ``space``; server 0, on the same machine, lives."""
    found = []
    for formed in (False, True):
        said: list[str] = []
        ended, codes = threading.Event(), list[int]()
        logger = SimpleNamespace(critical=lambda text, *given, said=said: said.append(text % given))
        lives = Member("there", replace(Process.here(), space=space or Process.here().space))
        dead = Member("there", replace(lives.process, pid=2**22 + 1))  # more than any process number
        pool = Members(PoolStore(dist.distributed_c10d._get_default_store()), [Member.here(), lives, dead], 0, 1)
        board.Board.post = lambda self, failure, seconds=3.0: failure  # the store keeps one failure
        board._PERIOD_S, board._BEAT_S = 0.1, 0.2
        health._PERIOD_S, health._LOST_S, health._STARTING_S, health._HEARD_S = 0.2, 1.5, 2.5, 0.1
        with patch.object(failure_reports, "logger", logger):
            watching = Health(pool=pool, give_up=lambda code, *_, c=codes, e=ended: (c.append(code), e.set()))
            of_server = board.Board(1, list(watching._names_of_life.values()), pool.store)
            if formed:
                watching.pool_has_formed()
            ended.wait(4 if formed else 20)
            of_server.stop()
            watching.stop()
        found.append((codes[:1], said[:1]))
    return found


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (None, "Server 1 died in starting"),
        ("another", "No sign of life from Server 1 on there for 2 s, in starting: the process, its node or"),
    ],
)
def test_a_server_that_dies_ends_homes_only_before_the_pool_has_formed(
    answers: Answers, space: str | None, words: str
) -> None:
    (((code,), (said,)), formed) = answers[_lose_a_server, space].result()[0]
    assert code == 1 and said.startswith(words) and formed == ([], [])


def _lose_a_node() -> tuple[str, float, int]:
    """Rank 1 stands for another node and goes silent, as one without power does; what rank 0 says, and when."""
    said: list[str] = []
    ended = threading.Event()

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger().addHandler(Keep())
    # Beats are further apart than looks at the store, which the board takes for granted.
    health._LOST_S, health._HEARD_S, board._BEAT_S = 7.0, 1.5, 1.2
    health._PERIOD_S = board._PERIOD_S = 0.5
    other = dist.get_rank() == 1
    if other:
        process.machine_name = lambda: "another node"
    codes: list[int] = []
    watching = Health(give_up=lambda code: (codes.append(code), ended.set()))
    watching.doing("step 7")
    assert not ended.wait(8.5), f"all nodes live: {said}"
    lost = time.monotonic()
    if other:
        assert watching._board is not None
        watching._board.stop()
        watching._stop.set()
        time.sleep(10)
        return "", 0.0, 0
    assert ended.wait(60)
    watching.stop()
    return said[0], time.monotonic() - lost, codes[0]


def test_a_node_that_vanishes_is_named(answers: Answers) -> None:
    said, seconds, code = answers[_lose_a_node,].result()[0]
    assert re.match("No sign of life from ranks 1 on .* in step 7: the node or its network is gone", said), said
    assert code == 1 and seconds < 60
    assert health._LOST_S + health._HEARD_S + 2 * board._BEAT_S < 60


def _lose_the_store(server: bool) -> tuple[str, int]:
    """What a rank, or a server without a model, says and ends with when no question to the store returns any more."""
    said: list[str] = []
    ended, hangs = threading.Event(), threading.Event()

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger().addHandler(Keep())
    health._LOST_S, health._HEARD_S = 3.0, 0.5
    codes: list[int] = []
    meeting = PoolStore(dist.distributed_c10d._get_default_store())
    pool = Members(meeting, [Member.here()] * 2, own=1, homes=1) if server else None
    watching = Health(pool=pool, give_up=lambda code: (codes.append(code), ended.set()))

    class Gone:
        def __getattr__(self, _: str) -> object:
            return lambda *_: hangs.wait(60)

    assert watching._board is not None
    watching._board._store = meeting._store = Gone()
    assert ended.wait(15)
    hangs.set()
    watching.stop()
    return said[0], codes[0]


@pytest.mark.parametrize("who", ["rank 0", "server 0"])
def test_a_store_that_answers_no_more_ends_who_asks_it(answers: Answers, who: str) -> None:
    ((said, code),) = answers[_lose_the_store, who == "server 0"].result()
    assert f"has not answered {who} for" in said and "the node or its network is gone" in said and code == 1


def _wait_for_a_pool() -> tuple[str, int]:
    """What a home says and ends with if its library never connects it with a server."""
    from megatron_patches.ranks import server_members

    codes, ended = list[int](), threading.Event()
    watching = Health(give_up=lambda code: (codes.append(code), ended.set()))
    server_members._LATE_S = 0.1
    store = SimpleNamespace(group=lambda *_: ended.wait(20))
    home = SimpleNamespace(_tp=1, generation=1, _servers=[None], _store=store, _device=None)
    with redirect_stderr(io.StringIO()) as heard, patch.object(health, "_HEARD_S", 0.1):
        log.console.cache_clear()
        assert server_members.ServerMembers._group(home, timedelta(seconds=0.1))
    watching.stop()
    return heard.getvalue(), codes[0]


def test_a_pool_that_does_not_form_ends_all() -> None:
    ((said, code),) = run_ranks(1, _wait_for_a_pool)
    assert "has not formed in 0 s: a server is lost" in " ".join(said.split()) and code == log.MISTAKE


def _told_early_and_late() -> tuple[str, list[int]]:
    """SIGUSR1 while a rank starts, and both signals once it has left the others, when nothing is left to save."""
    codes: list[int] = []
    watching = Health(give_up=codes.append)
    os.kill(os.getpid(), signal.SIGUSR1)
    end = time.monotonic() + 60
    while not watching.asked_by and time.monotonic() < end:
        time.sleep(0.05)
    watching.part()
    for number in (signal.SIGUSR1, signal.SIGTERM):
        os.kill(os.getpid(), number)
    time.sleep(0.2)
    return watching.asked_by, codes


def test_signals_end_no_rank_that_starts_or_has_saved() -> None:
    assert run_ranks(1, _told_early_and_late) == [("SIGUSR1", [])]


def _refuse_alike() -> tuple[str, int]:
    """What a rank says and ends with where both find the same mistake, the second one later."""
    codes: list[int] = []
    watching = Health(give_up=codes.append)
    time.sleep(1.5 * dist.get_rank())
    with redirect_stderr(io.StringIO()) as heard, suppress(SystemExit):
        cache_clear = log.console.cache_clear
        cache_clear()
        with watching.ends_failures():
            raise ConfigError("tp is 3; change it.")
    watching.stop()
    return heard.getvalue(), codes[0]


def test_what_all_ranks_refuse_is_said_once_and_by_the_first(answers: Answers) -> None:
    (first, code_1), (second, code_2) = answers[_refuse_alike,].result()
    assert first == "error: tp is 3; change it.\nnext step: change the setting that is named and start again.\n"
    assert (second, code_1, code_2) == ("", 2, 2)
