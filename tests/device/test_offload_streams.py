"""On a GPU no copy races with computation: streams in which nothing runs, but in which the order of accesses is known.

Tensors are on the CPU, whose allocator, like a GPU's, gives memory that was freed to whoever asks next.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from distca.device import offload
from distca.device.offload import Offload, Parked

COMPUTE, COPIES = 0, 1
Clock = list[int]


class Streams:
    """What each stream has been given, and how much of the other one's work comes before that for certain."""

    def __init__(self) -> None:
        self.clocks: list[Clock] = [[0, 0], [0, 0]]
        self.current, self.races = COMPUTE, 0
        self._seen: list[tuple[int, int, bool, int, int]] = []

    def use(self, *accesses: tuple[bool, torch.Tensor]) -> None:
        """Give the current stream work that reads or writes memory."""
        now, stream = self.clocks[self.current], self.current
        now[stream] += 1
        for writes, tensor in accesses:
            begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            for other, when, wrote, first, last in self._seen:
                overlaps = first < end and begin < last and (writes or wrote)
                self.races += overlaps and when > now[other]
            self._seen.append((stream, now[stream], writes, begin, end))
        # What both streams have behind them can race with nothing any more.
        self._seen = [each for each in self._seen if each[1] > min(clock[each[0]] for clock in self.clocks)]

    @contextmanager
    def inside(self, stream: int) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()

    class Event:
        def record(self, stream: int | None = None) -> None:
            self.clock = list(made.clocks[made.current if stream is None else stream])

        def wait(self, stream: int) -> None:
            made.clocks[stream][:] = map(max, made.clocks[stream], self.clock)

    copy = torch.Tensor.copy_

    def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking and made.current == COPIES
        made.use((True, target), (False, source))
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(offload, "Event", Event)
    monkeypatch.setattr(offload, "page_lock", lambda chunk: True)
    monkeypatch.setattr(offload, "page_unlock", lambda chunk: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: COPIES)
    monkeypatch.setattr(torch.cuda, "stream", made.inside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made.current)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


def _step(streams: Streams, parking: Offload, chance: random.Random, first: int) -> None:
    """Forward, and backward in about the reverse order, or none, or one that ends before it is done."""
    parked: list[tuple[int, Parked]] = []
    for number in range(first, first + 12):
        made = torch.empty(chance.choice((16, 40)))
        streams.use((True, made))
        made.fill_(number)
        parked.append((number, parking.park(made)))
        if chance.random() < 0.3:
            parked.append((number, parking.park(made[4:12])))
    stays = chance.choice((0, 0, 0, 3, len(parked)))
    while len(parked) > stays:
        number, tensor = parked.pop(-1 - chance.randrange(min(3, len(parked))))
        values = tensor.take()
        streams.use((False, values))
        assert (values == number).all()
        more = torch.empty(chance.choice((16, 40)))
        streams.use((True, more))


@pytest.mark.parametrize("seed", range(4))
def test_no_copy_races_with_computation(streams: Streams, seed: int) -> None:
    chance = random.Random(seed)
    parking = Offload(torch.device("cuda", 0), chance.randrange(4), chance.randrange(4), chunk_bytes=256)
    for first in range(0, 1800, 12):
        _step(streams, parking, chance, first)
    assert streams.races == 0


@pytest.mark.parametrize("which", ["record", "wait"])
def test_a_race_is_seen(streams: Streams, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """Without an order between the streams there are some."""
    event: Any = offload.Event
    monkeypatch.setattr(event, which, lambda self, stream=None: setattr(self, "clock", [0, 0]))
    parking, chance = Offload(torch.device("cuda", 0), 2, 2, chunk_bytes=256), random.Random(1)
    for first in range(0, 60, 12):
        _step(streams, parking, chance, first)
    assert streams.races > 0
