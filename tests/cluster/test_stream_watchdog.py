"""The watchdog: a rank that is gone ends who waits for it, with a sentence; one that is late does not."""

import logging
import signal
import subprocess
import sys
import threading
import time

import pytest

from distca.cluster import stream_watchdog
from distca.cluster.stream_watchdog import Process, Wait, Watchdog


class _Never:
    def query(self):
        return False


class _Always:
    def query(self):
        return True


@pytest.fixture
def peer(monkeypatch):
    monkeypatch.setattr(stream_watchdog, "_LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(stream_watchdog, "_GRACE_S", 0.1)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def _start(peer, missing):
    ended = threading.Event()
    processes = [Process.here(), Process(peer.pid, Process.here().space)]
    return Watchdog((4, 6), 0, processes, missing, ended.set), ended


def test_a_killed_rank_ends_who_waits_for_it(peer, caplog):
    dog, ended = _start(peer, lambda wait: list(wait.peers))
    dog.note(Wait(_Always(), (1,), 6, "rows of"))
    dog.note(Wait(_Never(), (1,), 7, "rows of"))
    assert not ended.wait(0.3), "rank 1 is alive"
    with caplog.at_level(logging.CRITICAL):
        peer.send_signal(signal.SIGKILL)  # a zombie until it is waited for: it counts as gone all the same
        assert ended.wait(5)
    assert "Rank 4 waits for rows of exchange 7 from rank 6, which has ended" in caplog.text


def test_a_killed_rank_is_named_also_where_the_gpu_does_not_answer(peer, caplog, monkeypatch):
    monkeypatch.setattr(stream_watchdog, "_ANSWER_S", 0.1)
    hangs = threading.Event()
    dog, ended = _start(peer, lambda wait: hangs.wait(60) and [])
    dog.note(Wait(_Never(), (1,), 7, "rows of"))
    assert not ended.wait(0.4), "rank 1 is alive"
    with caplog.at_level(logging.CRITICAL):
        peer.kill()
        assert ended.wait(5)
    hangs.set()
    assert "Rank 4 waits for rows of exchange 7 from rank 6, which has ended" in caplog.text


def test_a_rank_that_ended_after_its_rows_came_ends_nobody(peer, monkeypatch):
    monkeypatch.setattr(stream_watchdog, "_GRACE_S", 0.5)
    asked = []
    # The first answer is from before they came.
    dog, ended = _start(peer, lambda wait: asked.append(wait) or ([1] if len(asked) == 1 else []))
    peer.kill()
    peer.wait()
    dog.note(Wait(_Never(), (1,), 7, "rows of"))
    assert not ended.wait(1)
    assert len(asked) > 1
    dog.stop()


def test_rows_that_arrived_do_not_count_as_missing(peer):
    dog, ended = _start(peer, lambda wait: [])
    dog.note(Wait(_Never(), (1,), 7, "rows of"))
    peer.kill()
    assert not ended.wait(0.3)
    dog.stop()


def test_a_late_rank_is_warned_about(peer, caplog, monkeypatch):
    monkeypatch.setattr(stream_watchdog, "_WARN_EVERY_S", 0.1)
    with caplog.at_level(logging.WARNING):
        dog, ended = _start(peer, lambda wait: [1])
        dog.note(Wait(_Never(), (1,), 9, "room that is taken by"))
        deadline = time.monotonic() + 5
        while "still running" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.02)
        dog.stop()
    assert "for room that is taken by exchange 9 from rank 6, which is still running" in caplog.text
    assert not ended.is_set()


def test_a_process_of_another_container_or_machine_is_never_taken_for_dead(monkeypatch):
    here = Process(2**22 + 1, Process.here().space)
    assert not here.is_running()
    assert Process(2**22 + 1, "pid:[another]").is_running()
    # A machine whose first space of ids has the same number.
    monkeypatch.setattr(stream_watchdog, "machine_name", lambda: "another")
    assert here.is_running()
