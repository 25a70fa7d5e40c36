"""Exchanges of random plans between simulated ranks, and how many of them end wrong."""

import random
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from distca.plan import AttentionKind, Links, Plan, Tasks, lay_out, route
from distca.runtime.device_routes import ServerRoute
from distca.testing.plans import random_plan
from distca.transport import Part
from distca.transport.nvshmem.interface import Put
from distca.transport.nvshmem.transport import OneSidedTransport
from tests.transport.nvshmem.streams import Stream

KINDS = [AttentionKind(1.0)]

RANKS, PLANS, WIDTH = 4, 24, 6
LENGTHS = ([40, 3, 1, 17, 90], [61], [1, 1, 1], [7] * 30, [1], [70, 40], [90])


def _any_ways(ways, draw):
    """Every rank chooses anew for every exchange."""
    return replace(
        ways,
        push_below_bytes=draw.choice((0, 800, 1 << 40)),
        push_below_bytes_per_range=0,
        signal_after_bytes=draw.choice((0, 1500, 1 << 40)),
        keep_from_bytes=draw.choice((0, 1 << 40)),
        keep_from_bytes_per_range=0,
    )


def _exchanges():
    """For every exchange, every rank's parts, and what their destinations must hold in the end."""
    generator = torch.Generator().manual_seed(5)
    there, back = ("q_to_server", "kv_to_server"), ("q_to_home", "kv_to_home")
    for number in range(PLANS):
        if number % 3:
            # Two ranks share a node, to which rows travel once.
            plan = random_plan(lay_out(LENGTHS[number % len(LENGTHS)], RANKS)[0], number, cuts=6)
            ways = (there, back)
        else:
            # One rank sends all that there is to another and gets nothing back: it may run ahead.
            home, server = number // 3 % RANKS, (number // 3 + 1) % RANKS
            layout = lay_out([60], RANKS, rank_of=[home])[0]
            plan, ways = Plan(layout, Tasks.sorted(*np.array([[0, 0, 60, server]]).T)), (there,) * 6
        routes = [ServerRoute.of(route(plan, rank, Links(2)), KINDS, "cpu") for rank in range(RANKS)]
        for names in ways:
            moves = [[getattr(each, name) for name in names] for each in routes]
            parts = [tuple(_part(one, generator) for one in each) for each in moves]
            yield parts, list(zip(*(_expected([each[k] for each in parts]) for k in range(len(names))), strict=True))


def _part(moves, generator):
    before = 0.0 if moves.reduction is not None else 7.0
    source = torch.randn(moves.source_rows, WIDTH, generator=generator)
    return Part(source, torch.full((moves.destination_rows, WIDTH), before), moves)


def _expected(parts):
    """By rank, what the destination of its part must hold."""
    moves, sources = [part.moves for part in parts], [part.source for part in parts]
    if moves[0].relay_before is not None:
        sources = _delivered([each.relay_before for each in moves], sources, sources)
    found = _delivered(moves, sources, [part.destination for part in parts])
    if moves[0].relay_after is not None:
        found = _delivered([each.relay_after for each in moves], found, found)
    return found


def _delivered(moves, sources, destinations):
    found = [destination.clone() for destination in destinations]
    for rank, (own, destination) in enumerate(zip(moves, found, strict=True)):
        own.copy_kept(sources[rank], destination)
        sent = [sources[peer][_rows_for(each, rank)] for peer, each in enumerate(moves)]
        own.place_received(torch.cat(sent), destination)
    return found


def _rows_for(moves, rank):
    first = sum(moves.send_counts[:rank])
    return moves.send_index[first : first + moves.send_counts[rank]]


def count_wrong(world, fabrics, seed, credits=True):
    """How many destinations are wrong when their exchange was waited for; two are under way at a time."""
    exchanges, wrong = list(_exchanges()), [0] * RANKS
    # Rows that nobody has written yet must not pass for right.
    for fabric in fabrics:
        fabric.receive_buffer.fill_(255)

    def run(rank):
        fabric, draw = fabrics[rank], random.Random(100 * seed + rank)
        if not credits:
            put = fabric.put
            fabric.put = lambda number, reuses, puts: put(number, 0, puts)
        transport, under_way = OneSidedTransport(fabric, "simulated"), []
        for parts, expected in exchanges:
            fabric.intranode.policy = _any_ways(fabric.intranode.policy, draw)
            under_way.append((transport.launch(parts[rank]), parts[rank], expected[rank]))
            world.some_work(draw.choice((0, 0, 3, 300)))
            if len(under_way) == 2:
                if rank == seed % RANKS:
                    time.sleep(0.002)  # a rank that is late to take its rows out
                wrong[rank] += _finish(*under_way.pop(0))
        for each in under_way:
            wrong[rank] += _finish(*each)

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(run, range(RANKS)))
    return sum(wrong)


def one_row(peers):
    """One row of ones for each of the peers."""
    row, index = torch.ones(1, 4), torch.zeros(1, dtype=torch.int64)
    return {peer: [Put(row, np.array([[0, 0, 1]]), index, 0)] for peer in peers}


def late_stream(world, work):
    """A stream that does some work and does not begin before something is in the list that is returned too."""
    stream, begin = Stream(world), []

    def advance():
        if begin:
            work()
        return bool(begin)

    stream.operations.append(advance)
    return stream, begin


def check_rows_are_made_first(world, one, two):
    """What one rank's stream still computes is not sent to the other before."""
    puts = one_row([1])
    stream, begin = late_stream(world, lambda: puts[1][0].source.fill_(2))
    one.compute_on(stream)
    one.put(1, 0, puts)
    world.all_work()
    assert not two.receive_buffer.any()
    begin.append("now")
    two.arrived(1, [0])
    assert (two.receive_buffer[:16].view(torch.float32) == 2).all()


def check_sources_are_held(world, one):
    """Until nobody has the token of what is sent."""
    puts = one_row([1])
    source = weakref.ref(puts[1][0].source)
    token = one.put(1, 0, puts)
    del puts
    assert source() is not None
    del token
    assert source() is None


def _finish(handle, parts, expected):
    handle.wait()
    wrong = sum(not torch.equal(part.destination, rows) for part, rows in zip(parts, expected, strict=True))
    # Both belong to the caller again.
    for part in parts:
        part.source.fill_(torch.nan)
        part.destination.fill_(torch.nan)
    return wrong
