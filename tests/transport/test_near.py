"""The order in which writes, waits and signals are queued on streams: right however streams overtake each other."""

from dataclasses import replace

import pytest
import torch

from tests.transport.exchanges import RANKS, count_wrong, one_row
from tests.transport.streams import Fabric, World


def _run(seed, credits=True):
    world = World(RANKS, 14000, seed)
    return count_wrong(world, [Fabric(world, rank) for rank in range(RANKS)], seed, credits)


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_right_whatever_way_they_take_and_however_streams_overtake_each_other(seed):
    assert _run(seed) == 0


def test_without_waiting_for_room_rows_are_overwritten():
    assert any(_run(seed, credits=False) for seed in range(3))


@pytest.mark.parametrize("below", [(0, 1 << 40), (1 << 40, 0)])
def test_a_peer_without_room_is_not_written_to_whichever_stream_comes_next(below):
    """By engine, then by kernel, and the other way round: only the first one's stream waits for room."""
    world = World(RANKS, 1000, 0)
    fabrics = [Fabric(world, rank) for rank in range(RANKS)]
    near = fabrics[0].near
    near.ways = replace(near.ways, push_below_bytes=below[0], push_below_bytes_per_range=0)
    fabrics[1].taken(3)
    first = near.put(5, 3, one_row([1, 2]))
    near.ways = replace(near.ways, push_below_bytes=below[1])
    second = near.put(6, 3, one_row([2]))
    assert first.reuses == second.reuses == 3
    world.some_work(300)
    assert not fabrics[2].landing.any()
    fabrics[2].taken(3)
    fabrics[2].arrived(6, [0])
    fabrics[1].arrived(5, [0])
    fabrics[0].join(second)
    assert (fabrics[2].landing[:16].view(torch.float32) == 1).all()


def test_a_peer_that_gets_no_rows_is_signalled_all_the_same():
    world = World(2, 1000, 0)
    one, two = (Fabric(world, rank) for rank in range(2))
    one.put(1, 0, {1: []})
    two.arrived(1, [0])
