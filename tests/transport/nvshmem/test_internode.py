"""Rows and signals for inter-node peers: right however late and in whatever order a network delivers them."""

import ctypes
import re
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.transport.nvshmem.interface import Put
from distca.transport.nvshmem.internode import (
    InternodeAddresses,
    InternodePeers,
    cut_into_loads,
    staging_bytes,
    why_not_row,
)
from tests.transport.exchanges import (
    RANKS,
    check_rows_are_made_first,
    check_sources_are_held,
    count_wrong,
    late_stream,
    one_row,
)
from tests.transport.nvshmem import streams
from tests.transport.nvshmem.streams import PATIENCE_S, Fabric, World

HALF = 768
MACHINES = {"all far": "abcd", "two nodes": "aabb"}


def _fabrics(world, machines):
    return [
        Fabric(world, rank, [peer for peer in range(RANKS) if machines[peer] != machines[rank]])
        for rank in range(RANKS)
    ]


def _run(seed, machines, credits=True, spoil=lambda fabric: None):
    world = World(RANKS, 14000, seed, staging=2 * HALF)
    fabrics = _fabrics(world, MACHINES[machines])
    for fabric in fabrics:
        spoil(fabric)
    return count_wrong(world, fabrics, seed, credits)


@pytest.mark.parametrize("machines", MACHINES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in (1, 2, 3))])
def test_rows_are_right_however_the_network_delivers(seed, machines):
    assert _run(seed, machines) == 0


def _brings_wrong_rows(machines, **how):
    """Whether some run does; one that never ends says nothing."""
    for seed in range(8):
        try:
            if _run(seed, machines, **how):
                return True
        except TimeoutError:
            continue
    return False


def test_without_waiting_for_room_rows_are_overwritten():
    assert _brings_wrong_rows("all far", credits=False)


def _quiet_for_signals_only(fabric):
    """Its quiets do not wait for rows."""
    queue, travelling = fabric.far_queue, fabric._world.travelling
    put = queue.put

    def unnoted(to, source, size, peer, stream):
        put(to, source, size, peer, stream)
        send = stream.operations.pop()
        stream.operations.append(lambda: send() and bool(travelling[fabric.rank].pop()))

    queue.put = unnoted


def test_without_quiet_signals_overtake_rows():
    assert _brings_wrong_rows("two nodes", spoil=_quiet_for_signals_only)


def _handing_on_at_once(fabric):
    """Its second hop waits for nothing."""
    arrived = fabric.arrived

    def unless_beside(number, peers):
        if not isinstance(fabric.near_queue.here, streams.Stream):
            arrived(number, peers)

    fabric.arrived = unless_beside


def test_without_waiting_for_the_first_hop_the_second_hands_on_wrong_rows():
    assert _brings_wrong_rows("two nodes", spoil=_handing_on_at_once)


class Lazy:
    """Does everything at once but what travels, which is as late as a quiet allows; its one rank writes to itself."""

    def __init__(self, memory, at_signal):
        self.travelling, self.at_signal = [], at_signal

    def create_stream(self, priority):
        return self

    def current_stream(self):
        return self

    def mark(self, stream):
        return "event"

    def wait_event(self, event):
        pass

    def push_rows(self, pieces, arrived, number, finished_blocks, most_blocks, stream):
        assert len(arrived) == 0
        for rows, index, to in pieces:
            packed = rows[index]
            ctypes.memmove(to, packed.data_ptr(), packed.numel() * packed.element_size())

    def put(self, to, source, size, peer, stream):
        self.travelling.append((to, source, size))

    def quiet(self, stream):
        for to, source, size in self.travelling:
            ctypes.memmove(to, source, size)
        self.travelling.clear()

    def set_signal(self, slot, number, peer, stream):
        self.at_signal()


@st.composite
def _puts(draw):
    """(receive_buffer bytes, {peer: pieces}) that lie behind each other, of rows up to as wide as a half."""
    puts, place = {}, 0
    for peer in range(draw(st.integers(1, 3))):
        puts[peer] = []
        for _ in range(draw(st.integers(0, 3))):
            rows, width = draw(st.integers(0, 40)), draw(st.sampled_from([1, 16, 60, 255, HALF]))
            source = torch.randint(0, 256, (50, width), dtype=torch.uint8)
            index = torch.randint(0, 50, (rows,))
            first = draw(st.integers(0, 3))
            ranges = np.array([[int(row), first + k, 1] for k, row in enumerate(index.tolist())], np.int64)
            puts[peer].append(Put(source, ranges.reshape(-1, 3), index, place))
            place += (first + rows) * width
    return place, puts


@settings(deadline=None, max_examples=60)
@given(_puts(), _puts())
def test_rows_are_there_when_they_are_signalled(first, second):
    """With the staging memory used again and again; not a byte beside them is touched."""
    size = max(first[0], second[0])
    memory = torch.zeros(size + 2 * HALF, dtype=torch.uint8)
    expected = torch.zeros(size, dtype=torch.uint8)
    signals = []
    queue = Lazy(memory, lambda: signals.append(torch.equal(memory[:size], expected)))
    far = InternodePeers(
        InternodeAddresses(memory.data_ptr(), memory.data_ptr() + size, 2 * HALF, 0, 0, 0, 0), "cpu", queue
    )
    for number, (_, puts) in enumerate((first, second), 1):
        for pieces in puts.values():
            for put in pieces:
                begin = put.begin + (int(put.ranges[0, 1]) * put.row_bytes if len(put.rows) else 0)
                expected[begin : begin + put.bytes] = put.source[put.rows].flatten()
        sent, _ = far.put(number, 0, puts)
        assert sent.peers == tuple(puts)
    assert signals == [True] * (len(first[1]) + len(second[1]))


@settings(deadline=None, max_examples=60)
@given(_puts(), st.sampled_from([HALF, 4 * HALF, 1 << 20]))
def test_loads_hold_every_row_once(case, capacity):
    _, puts = case
    loads = list(cut_into_loads(puts, capacity))
    for load in loads:
        assert load and load[-1].staged + load[-1].size <= capacity
        assert all(each.staged % 256 == 0 and each.size > 0 for each in load)
        assert all(a.staged + a.size <= b.staged for a, b in pairwise(load))
    slices = [each for load in loads for each in load]
    expected = [(peer, put) for peer, pieces in puts.items() for put in pieces if len(put.rows)]
    for peer, put in expected:
        lands, rows = put.begin + int(put.ranges[0, 1]) * put.row_bytes, []
        while sum(map(len, rows)) < len(put.rows):
            each = slices.pop(0)
            assert (each.peer, each.lands, each.size) == (peer, lands, len(each.rows) * put.row_bytes)
            assert each.source is put.source
            rows.append(each.rows)
            lands += each.size
        assert torch.equal(torch.cat(rows), put.rows)
    assert not slices
    # As few loads as there can be, but for rows that do not fill the rest of one and for what alignment takes.
    size = sum(put.bytes + 256 for _, put in expected)
    assert len(loads) <= 1 + size / max(1, capacity - HALF + 1)


@given(st.integers(0, 1 << 40))
def test_staging_memory_is_two_aligned_halves(capacity):
    size = staging_bytes(capacity)
    assert size % 512 == 0 and 2 << 20 <= size <= 64 << 20
    assert size == 2 << 20 or size <= capacity / 4


@given(st.integers(1, 32 << 20), st.integers(1, 1 << 30))
def test_a_row_that_a_load_cannot_hold_is_a_sentence_with_a_size_that_can(row, capacity):
    said = why_not_row(row, capacity)
    assert (said is None) == (row <= staging_bytes(capacity) // 2)
    if said is not None:
        size = re.search(r"set `nvshmem_buffer_gb` to ([\d.]+) or more, or `transport` to nccl", said)[1]
        assert why_not_row(row, int(float(size) * 2**30)) is None


def test_the_sentence_on_a_long_row_has_its_size_and_the_limit():
    assert why_not_row(2 << 20, 8 << 20) == (
        "`nvshmem_buffer_gb` gives 0.00781 GiB of symmetric memory per rank. Rows for other nodes then have at most 1 "
        "MiB, but a row has 2 MiB; set `nvshmem_buffer_gb` to 0.02 or more, or `transport` to nccl."
    )
    assert why_not_row(33 << 20, 8 << 30).endswith("but a row has 33 MiB; set `transport` to nccl.")


def test_a_peer_without_room_is_not_written_to():
    world = World(RANKS, 1000, 0, staging=2 * HALF)
    fabrics = _fabrics(world, MACHINES["all far"])
    fabrics[1].consumed(3)
    sent = fabrics[0].put(5, 3, one_row([1, 2]))
    assert (sent.peers, sent.reuses) == ((1, 2), 3)
    world.some_work(300)
    assert not fabrics[2].receive_buffer.any()
    fabrics[2].consumed(3)
    fabrics[2].arrived(5, [0])
    assert (fabrics[2].receive_buffer[:16].view(torch.float32) == 1).all()


def test_rows_are_packed_once_they_are_made():
    world = World(2, 1000, 0, staging=2 * HALF)
    check_rows_are_made_first(world, *(Fabric(world, rank, [1 - rank]) for rank in range(2)))


def test_sources_are_held_while_they_are_packed():
    world = World(2, 1000, 0, staging=2 * HALF)
    check_sources_are_held(world, Fabric(world, 0, [1]))


def test_a_peer_that_gets_no_rows_is_signalled_all_the_same():
    world = World(2, 1000, 0, staging=2 * HALF)
    one, two = (Fabric(world, rank, [1 - rank]) for rank in range(2))
    one.put(1, 0, {1: []})
    two.arrived(1, [0])


def test_what_was_taken_is_told_in_steps_that_add_up():
    """And a number that was told before is told again by saying nothing."""
    world = World(2, 1000, 0, staging=2 * HALF)
    one, two = (Fabric(world, rank, [1 - rank]) for rank in range(2))
    for number in (1, 1, 4, 9):
        one.consumed(number)
    sent = two.put(10, 9, {0: []})
    two.join(sent)
    assert streams.read(world.bases[1] + 8 * 2) == 9


def test_sources_are_free_once_packed_and_kept_rows_wait_for_no_network():
    world = World(2, 1000, 0, staging=2 * HALF)
    one, two = (Fabric(world, rank, [1 - rank]) for rank in range(2))
    held_up, quiet = [], one.far_queue.quiet

    def held_up_quiet(stream):
        stream.operations.append(lambda: bool(held_up))
        quiet(stream)

    one.far_queue.quiet = held_up_quiet
    puts = one_row([1])
    sent = one.put(1, 0, puts)
    one.join(sent)
    puts[1][0].source.zero_()
    assert not sent.written.done and not sent.intranode.events
    one.intranode.keep = lambda parts, behind: behind
    assert one.keep((), sent) is sent.intranode
    held_up.append("no longer")
    two.arrived(1, [0])
    world.until(lambda: sent.written.done)
    assert (two.receive_buffer[:16].view(torch.float32) == 1).all()


def test_a_rank_that_ends_lets_its_signals_arrive_but_waits_for_no_lost_peer():
    world = World(2, 1000, 0, staging=2 * HALF)
    one, two = (Fabric(world, rank, [1 - rank]) for rank in range(2))
    delivers = []

    def slow(slot, number, peer, stream):
        effects = [lambda: bool(delivers), lambda: streams.write(world.bases[1], number) or True]
        stream.operations.append(lambda: world.send(0, effects, ordered=True) or True)

    one.far_queue.set_signal = slow
    two.join(one.put(1, 0, one_row([1])))
    assert _finish(world, one, 0.2) >= 0.2
    delivers.append("again")
    assert _finish(world, one, PATIENCE_S) < PATIENCE_S
    assert streams.read(world.bases[1]) == 1


def test_a_rank_that_ends_waits_for_what_its_computation_still_tells():
    world = World(2, 1000, 0, staging=2 * HALF)
    fabric = Fabric(world, 0, [1])
    stream, begin = late_stream(world, lambda: None)
    fabric.compute_on(stream)
    fabric.consumed(1)
    assert _finish(world, fabric, 0.2) >= 0.2
    begin.append("now")
    assert _finish(world, fabric, PATIENCE_S) < PATIENCE_S
    assert streams.read(world.bases[1] + 8 * 2) == 1


def _finish(world, fabric, patience_s):
    """Seconds that it takes."""
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        world.until(pool.submit(fabric._internode_peers.finish, patience_s).done)
    return time.monotonic() - began
