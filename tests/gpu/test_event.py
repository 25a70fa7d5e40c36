"""Python goes on while a stream takes no more work: whoever watches over a run must be able to end it then."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from distca.device.event import Event

pytestmark = pytest.mark.gpu
LAUNCHES = 5000
"""More than a stream holds."""
LONGEST_GAP_S = 0.3


@pytest.mark.alone
def test_other_threads_go_on_while_an_event_is_recorded_and_asked_for() -> None:
    stream, numbers = torch.cuda.Stream(), torch.zeros(8, device="cuda")
    launched, gaps, done = [0], [0.0], threading.Event()

    def launch() -> None:
        with torch.cuda.stream(stream):
            for _ in range(LAUNCHES):
                numbers.add_(1)
                launched[0] += 1

    def tick() -> None:
        last = time.monotonic()
        while not done.is_set():
            time.sleep(0.01)
            now = time.monotonic()
            gaps[0], last = max(gaps[0], now - last), now

    first, second = Event(), Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(5_000_000_000)  # some seconds
        first.record()
    launching, ticking = threading.Thread(target=launch), threading.Thread(target=tick)
    launching.start()
    time.sleep(1)
    before = launched[0]
    ticking.start()
    had_come = first.query()
    second.record(stream)
    done.set()
    for thread in (launching, ticking):
        thread.join()
    assert before < LAUNCHES and not had_come, "the stream was full when it was asked"
    assert gaps[0] < LONGEST_GAP_S
    second.synchronize()
    assert first.query() and second.query()
    stream.synchronize()  # the last launches may have come after the second event
    assert numbers[0].item() == LAUNCHES


def test_times_and_waits() -> None:
    stream, numbers = torch.cuda.Stream(), torch.zeros(1 << 20, device="cuda")
    begin, end = Event(timed=True), Event(timed=True)
    with torch.cuda.stream(stream):
        begin.record()
        torch.cuda._sleep(50_000_000)
        numbers.add_(1)
        end.record()
    end.wait(torch.cuda.current_stream())
    assert numbers.sum().item() == 1 << 20
    assert end.query() and 5 < begin.elapsed_time(end) < 5000
