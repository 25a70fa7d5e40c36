"""Waits of streams: a rank that is gone ends who waits for it, with a sentence; one that is late does not."""

from __future__ import annotations

import io
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from distca.cluster import health, waits
from distca.cluster.board import Board
from distca.cluster.failure_reports import EXIT_CODE
from distca.cluster.health import Health
from distca.cluster.process import Process, _state_and_start
from distca.cluster.waits import Wait, Waits


class _Never:
    def query(self) -> bool:
        return False


class _Always:
    def query(self) -> bool:
        return True


class _Passes:
    now = False

    def query(self) -> bool:
        return self.now


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    monkeypatch.setattr(health, "_PERIOD_S", 0.02)
    monkeypatch.setattr(health, "_WAIT_GRACE_S", 0.1)
    monkeypatch.setattr(waits, "_QUICK_S", 0.02)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def watch(
    peer: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[Waits, threading.Event]]]:
    """Watches the waits of rank 4 for rank 6, whose process is the peer's."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    made: list[Health] = []

    def start(missing: Callable[[Wait], list[int]]) -> tuple[Waits, threading.Event]:
        ended = threading.Event()
        watching = Health(ends_with_ranks=False, give_up=lambda code: code == EXIT_CODE and ended.set())
        found = _state_and_start(peer.pid)
        assert found is not None
        watching._rank = watching._reports._rank = 4
        watching._processes = {4: Process.here(), 6: replace(Process.here(), pid=peer.pid, started=found[1])}
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [4, 6])
        made.append(watching)
        return watching.watch_waits(dist.group.WORLD, missing), ended

    yield start
    for each in made:
        each.stop()
    dist.destroy_process_group()


@pytest.fixture
def closed_stream() -> Iterator[None]:
    """A handler of the log that cannot write any more, as one of an earlier test or of a pipe that is closed."""
    stream = io.TextIOWrapper(io.BytesIO())
    handler = logging.StreamHandler(stream)
    stream.close()
    logging.getLogger().addHandler(handler)
    yield
    logging.getLogger().removeHandler(handler)


def test_a_killed_rank_ends_who_waits_for_it(watch, peer, caplog, closed_stream):
    of_rank, ended = watch(lambda wait: list(wait.peers))
    of_rank.note(Wait(_Always(), (1,), 6, "rows of"))
    of_rank.note(Wait(_Never(), (1,), 7, "rows of"))
    assert not ended.wait(0.3), "rank 6 is alive"
    with caplog.at_level(logging.CRITICAL):
        peer.send_signal(signal.SIGKILL)  # a zombie until it is waited for: it counts as gone all the same
        assert ended.wait(60)
    assert "Rank 4 waits for rows of exchange 7 from rank 6, which has ended" in caplog.text


def test_a_killed_rank_is_named_also_where_the_gpu_does_not_answer(watch, peer, caplog, monkeypatch):
    monkeypatch.setattr(waits, "_ANSWER_S", 0.1)
    hangs = threading.Event()
    of_rank, ended = watch(lambda wait: hangs.wait(60) and [])
    of_rank.note(Wait(_Never(), (1,), 7, "rows of"))
    assert not ended.wait(0.4), "rank 6 is alive"
    with caplog.at_level(logging.CRITICAL):
        peer.kill()
        assert ended.wait(60)
    hangs.set()
    assert "Rank 4 waits for rows of exchange 7 from rank 6, which has ended" in caplog.text


def test_a_gpu_that_does_not_answer_holds_nobody_up():
    hangs = threading.Event()
    of_rank = Waits([0, 1], lambda wait: hangs.wait(200) and [])
    of_rank.note(Wait(_Never(), (1,), 7, "rows of"))
    began = time.monotonic()
    assert of_rank.stuck() is None and of_rank.stuck() is None
    assert time.monotonic() - began < 60, "the GPU answers after three minutes"
    hangs.set()


def test_a_rank_that_ended_after_its_rows_came_ends_nobody(watch, peer, monkeypatch):
    monkeypatch.setattr(health, "_WAIT_GRACE_S", 0.5)
    asked = []
    # The first answer is from before they came.
    of_rank, ended = watch(lambda wait: asked.append(wait) or ([1] if len(asked) == 1 else []))
    peer.kill()
    peer.wait()
    of_rank.note(Wait(_Never(), (1,), 7, "rows of"))
    assert not ended.wait(1)
    assert len(asked) > 1


def test_a_wait_that_passed_after_its_rank_had_ended_shortens_no_later_one(watch, peer, monkeypatch):
    monkeypatch.setattr(health, "_WAIT_GRACE_S", 0.5)
    waits_of_rank, asked, passed = [Wait(_Never(), (1,), number, "rows of") for number in (7, 8)], [], _Passes()
    waits_of_rank[0] = replace(waits_of_rank[0], passed=passed)

    def missing(wait):
        """Each is seen once before its rows come, and the second one more than the grace behind the first."""
        asked.append(wait.number)
        return [1] if asked.count(wait.number) == 1 else []

    of_rank, ended = watch(missing)
    peer.kill()
    peer.wait()
    of_rank.note(waits_of_rank[0])
    assert not ended.wait(1)
    passed.now = True
    of_rank.note(waits_of_rank[1])
    assert not ended.wait(0.3)
    assert {7, 8} == {*asked}


def test_rows_that_arrived_do_not_count_as_missing(watch, peer):
    of_rank, ended = watch(lambda wait: [])
    of_rank.note(Wait(_Never(), (1,), 7, "rows of"))
    peer.kill()
    assert not ended.wait(0.3)


def test_a_late_rank_is_warned_about(watch, caplog, monkeypatch):
    monkeypatch.setattr(health, "_WARN_EVERY_S", 0.1)
    with caplog.at_level(logging.WARNING):
        of_rank, ended = watch(lambda wait: [1])
        of_rank.note(Wait(_Never(), (1,), 9, "room that is held by"))
        deadline = time.monotonic() + 60
        while "still running" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.02)
    assert "for room that is held by exchange 9 from rank 6, which is still running" in caplog.text
    assert not ended.is_set()


def test_a_dead_rank_is_reported_with_details_before_who_waits_for_it_is(watch, peer, caplog, monkeypatch):
    """A launcher kills ranks a few seconds after one has died. So the grace that a wait gets must hold nothing up."""
    monkeypatch.setattr(health, "_WAIT_GRACE_S", 60.0)
    monkeypatch.setattr(health, "_DEATH_S", 0.1)
    monkeypatch.setattr(health, "_HEARD_S", 0.1)
    of_rank, _ = watch(lambda wait: list(wait.peers))
    watching, codes = health._of_process, list[int]()
    watching._give_up = codes.append
    watching._board = Board(0, [""])
    of_rank.note(Wait(_Never(), (1,), 7, "rows of"))
    with caplog.at_level(logging.CRITICAL):
        peer.kill()
        deadline = time.monotonic() + 30
        while not codes and time.monotonic() < deadline:
            time.sleep(0.02)
    watching._stop.set()
    assert codes[:1] == [1] and f"Rank 6 died in starting (process {peer.pid} on " in caplog.text
