"""What the timeline says of transfers between gloo ranks."""

import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from distca.device.clock import Instant
from distca.runtime.nodes import LayerCall
from distca.runtime.timeline import Timeline
from distca.testing.ranks import run_ranks
from distca.transport import Part
from distca.transport.collective import CollectiveTransport
from tests.transport.two_hops import moves_of

ROWS = 1 << 12
PAUSE_S = 0.3


def _recorded():
    """Microseconds of an exchange in two hops and of one in a single hop, both waited for a while after their rows
    could have arrived."""
    rank, transport, timeline = dist.get_rank(), CollectiveTransport(dist.group.WORLD), Timeline("cpu")
    there, _ = moves_of(rank, ROWS, ROWS, "cpu")
    timeline.start_recording()
    for moves in (there, replace(there, relay_after=None)):
        part = Part(torch.zeros(there.source_rows, 8), torch.zeros(ROWS, 8), moves)
        handle = transport.launch((part,))
        timeline.launched("q,k,v", handle, 0, 0, "forward")
        time.sleep(PAUSE_S)
        handle.wait()
    dist.barrier()  # gloo tells of an end a moment later
    return [event["duration_us"] for event in timeline.take(rank)]


def test_a_transfer_ends_with_its_second_hop():
    for two_hops, one_hop in run_ranks(2, _recorded):
        assert one_hop < PAUSE_S * 1e6 <= two_hops


@pytest.mark.parametrize("asked", [False, True])
def test_waits_for_transfers_are_timed_where_that_is_asked_for(asked):
    timeline, waited, joined = Timeline("cpu"), [], []
    timeline.times_waits = asked
    transport = SimpleNamespace(launch=lambda _: SimpleNamespace(wait=lambda: _timed(waited, time.sleep, 0.02)))
    call = LayerCall(SimpleNamespace(timeline=timeline), 0, 0, transport)
    for _ in range(2):
        call._launch("states", "forward")
        time.sleep(0.02)  # something hides as much
        _timed(joined, call._join, "states", "forward")
    found = timeline.take_waits()
    assert found.keys() == ({"states"} if asked else set()) and timeline.take_waits() == {}
    if asked:
        assert sum(waited) - 1e-4 <= found["states"] <= sum(joined) + 1e-4 and sum(waited) >= 0.04


def _timed(seconds, function, *arguments):
    began = time.perf_counter()
    function(*arguments)
    seconds.append(time.perf_counter() - began)


def test_spans_show_the_numbers_of_layers_that_were_given():
    timeline = Timeline("cpu", (1, 3))
    timeline.start_recording()
    with timeline.serve(0, 0, "forward"):
        pass
    timeline.open("pre", 1, 0, "forward")
    timeline.launched("o", SimpleNamespace(works=[1]), 1, 0, "forward")
    assert [span.name for span in timeline._spans] == ["serve 1 forward", "pre 3 forward", "o 3 forward"]


def test_a_transfer_that_failed_is_left_to_the_rank_that_joins_it(monkeypatch):
    def fail():
        raise dist.DistBackendError("NCCL communicator was aborted")

    timeline = Timeline("cpu")
    timeline.start_recording()
    timeline.clock.on_gpu, timeline._side_stream = True, "side"
    timeline.clock.now = timeline.clock.work = lambda: Instant(0.0)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    for wait in (fail, lambda: None):
        timeline.launched("o", SimpleNamespace(works=[SimpleNamespace(wait=wait)]), 0, 0, "forward")
    assert len(timeline._spans) == 2 and len(timeline.take(0)) == 1
