"""The order in which writes, waits and signals are queued on streams: right however streams overtake each other."""

import weakref
from dataclasses import replace

import pytest
import torch

from distca.plan import AttentionKind, lay_out, plan_at_home, route
from distca.runtime.device_routes import ServerRoute
from distca.transport import Part
from tests.transport.exchanges import (
    RANKS,
    check_rows_are_made_first,
    check_sources_are_held,
    count_wrong,
    late_stream,
    one_row,
)
from tests.transport.nvshmem.streams import Fabric, World

KINDS = [AttentionKind(1.0)]


def _run(seed, credits=True):
    world = World(RANKS, 14000, seed)
    return count_wrong(world, [Fabric(world, rank) for rank in range(RANKS)], seed, credits)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(2, 6))])
def test_rows_are_right_whatever_way_they_take_and_however_streams_overtake_each_other(seed):
    assert _run(seed) == 0


def test_without_waiting_for_room_rows_are_overwritten():
    assert any(_run(seed, credits=False) for seed in range(3))


@pytest.mark.parametrize("below", [(0, 1 << 40), (1 << 40, 0)])
def test_a_peer_without_room_is_not_written_to_whichever_stream_comes_next(below):
    """By engine, then by kernel, and the other way round: only the first one's stream waits for room."""
    world = World(RANKS, 1000, 0)
    fabrics = [Fabric(world, rank) for rank in range(RANKS)]
    near = fabrics[0].intranode
    near.policy = replace(near.policy, push_below_bytes=below[0], push_below_bytes_per_range=0)
    fabrics[1].consumed(3)
    first = near.put(5, 3, one_row([1, 2]))
    near.policy = replace(near.policy, push_below_bytes=below[1])
    second = near.put(6, 3, one_row([2]))
    assert first.reuses == second.reuses == 3
    world.some_work(300)
    assert not fabrics[2].receive_buffer.any()
    fabrics[2].consumed(3)
    fabrics[2].arrived(6, [0])
    fabrics[1].arrived(5, [0])
    fabrics[0].join(second)
    assert (fabrics[2].receive_buffer[:16].view(torch.float32) == 1).all()


def test_a_peer_that_gets_no_rows_is_signalled_all_the_same():
    world = World(2, 1000, 0)
    one, two = (Fabric(world, rank) for rank in range(2))
    one.put(1, 0, {1: []})
    two.arrived(1, [0])


@pytest.mark.parametrize("below", [0, 1 << 40])
def test_rows_are_sent_once_they_are_made(below):
    """By engine and by kernel."""
    world = World(2, 1000, 0)
    one, two = (Fabric(world, rank) for rank in range(2))
    one.intranode.policy = replace(one.intranode.policy, push_below_bytes=below, push_below_bytes_per_range=0)
    check_rows_are_made_first(world, one, two)


def test_sources_are_held_while_they_are_sent():
    world = World(2, 1000, 0)
    check_sources_are_held(world, Fabric(world, 0))


def _kept_by_engine(fabric):
    """A part of four rows, all of which stay."""
    fabric.intranode.policy = replace(fabric.intranode.policy, keep_from_bytes=0, keep_from_bytes_per_range=0)
    moves = ServerRoute.of(route(plan_at_home(lay_out([4], 1)[0]), 0), KINDS, "cpu").q_to_server
    return Part(torch.ones(4, 4), torch.zeros(4, 4), moves)


def test_kept_rows_are_copied_once_they_are_made():
    world = World(2, 1000, 0)
    fabric = Fabric(world, 0)
    part = _kept_by_engine(fabric)
    stream, begin = late_stream(world, lambda: part.source.fill_(2))
    fabric.compute_on(stream)
    fabric.keep([part], None)
    world.all_work()
    assert not part.destination.any()
    begin.append("now")
    world.all_work()
    assert (part.destination == 2).all()


def test_kept_rows_are_copied_behind_those_for_peers():
    world = World(2, 1000, 0)
    one, two = (Fabric(world, rank) for rank in range(2))
    part = _kept_by_engine(one)
    one.keep([part], one.put(2, 1, one_row([1])))
    world.all_work()
    assert not part.destination.any()
    two.consumed(1)
    world.all_work()
    assert part.destination.all()


def test_kept_rows_are_held_while_they_are_copied():
    world = World(2, 1000, 0)
    fabric = Fabric(world, 0)
    part = _kept_by_engine(fabric)
    tensors = weakref.ref(part.source), weakref.ref(part.destination)
    token = fabric.keep([part], None)
    del part
    assert all(each() is not None for each in tensors)
    del token
    assert all(each() is None for each in tensors)
