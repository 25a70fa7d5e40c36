"""The one-sided transport on CPU ranks: the same rows as by all-to-all, with little memory and a slow rank."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distca.errors import TransportError
from distca.plan import AttentionKind, Links, Plan, Tasks, lay_out, route
from distca.runtime.device_routes import ServerRoute
from distca.testing.plans import random_plan
from distca.testing.ranks import run_ranks
from distca.transport import Part
from distca.transport.collective import CollectiveTransport
from distca.transport.nvshmem.transport import OneSidedTransport
from tests.transport.nvshmem.host_fabric import HostFabric

KINDS = [AttentionKind(1.0)]

HEADS, DTYPE = 3, torch.bfloat16
LENGTHS = ([40, 3, 1, 17, 90], [61], [1, 1, 1], [7] * 30, [1])


def _exchanges(rank, ranks, seeds):
    """Moves of q and of k,v in both directions, of many random plans; two ranks share a node."""
    for seed in range(seeds):
        plan = random_plan(lay_out(LENGTHS[seed % len(LENGTHS)], ranks)[0], seed, cuts=3 * (1 + seed % 2))
        routed = ServerRoute.of(route(plan, rank, Links(2)), KINDS, "cpu")
        yield (routed.q_to_server, routed.kv_to_server)
        yield (routed.q_to_home, routed.kv_to_home)


def _parts(moves, seed, rank):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    parts = []
    for each in moves:
        source = torch.randn(each.source_rows, HEADS, 5, generator=generator).to(DTYPE)
        # Where rows are not added up, what nobody writes must stay as it is.
        before = 0.0 if each.reduction is not None else 7.0
        parts.append(Part(source, torch.full((each.destination_rows, HEADS, 5), before, dtype=DTYPE), each))
    return tuple(parts)


def _compare(capacity, seeds, fallback=None, at_once=False, shared=False, longest=None):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    fabric = HostFabric(capacity, longest=longest)
    collective = CollectiveTransport(dist.group.WORLD)
    one_sided = OneSidedTransport(fabric, "host", None if fallback is None else _Counted(collective, fallback))
    other = one_sided.for_another(collective, True) if shared else one_sided
    one_sided.waits_at_once = at_once
    pending, differing = [], 0
    for number, moves in enumerate(_exchanges(rank, ranks, seeds)):
        expected, parts = (_parts(moves, number, rank) for _ in range(2))
        collective.launch(expected).wait()
        pending.append(((one_sided, other)[number % 2].launch(parts), parts, expected))
        # Two exchanges are under way at a time, as in the ping-pong order, or one.
        if len(pending) == 2 - at_once:
            differing += _finish(*pending.pop(0))
    differing += sum(_finish(*each) for each in pending)
    assert not shared or (other.waits_at_once and not one_sided.waits_at_once and one_sided.fallback_exchanges == 0)
    return differing


def _finish(handle, parts, expected):
    handle.wait()
    return sum(not torch.equal(a.destination, b.destination) for a, b in zip(parts, expected, strict=True))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.matrix), 4])
def test_the_same_rows_as_by_all_to_all(ranks):
    # Room for about four exchanges: the ring goes round many times.
    assert run_ranks(ranks, _compare, 30000, 60) == [0] * ranks


def test_the_same_rows_where_each_exchange_is_waited_for_at_once():
    assert run_ranks(2, _compare, 30000, 30, None, True) == [0] * 2


def test_two_users_of_the_same_memory_may_differ_in_fallback_and_waits():
    assert run_ranks(2, _compare, 30000, 30, None, False, True) == [0] * 2


class _Counted:
    """A fallback transport that counts what it is given."""

    name = "all-to-all"

    def __init__(self, transport, counts):
        self._transport, self._counts = transport, counts

    def launch(self, parts):
        self._counts.append(sum(part.moves.most_received for part in parts))
        return self._transport.launch(parts)


def _compare_with_fallback(capacity, seeds, longest=None):
    fallback_exchanges = []
    return _compare(capacity, seeds, fallback_exchanges, longest=longest), fallback_exchanges


def test_what_the_memory_cannot_hold_goes_by_the_fallback_transport_on_all_ranks_alike():
    # Room for the smaller exchanges only, and sometimes for one beside another.
    results = run_ranks(4, _compare_with_fallback, 4000, 60)
    assert [wrong for wrong, _ in results] == [0] * 4
    by_fallback = [sizes for _, sizes in results]
    assert by_fallback == by_fallback[:1] * 4 and 20 < len(by_fallback[0]) < 115
    assert len(run_ranks(2, _compare_with_fallback, 1 << 20, 10)[0][1]) == 0


def test_one_rank_alone():
    assert run_ranks(1, _compare, 4096, 5) == [0]


def _send_only(exchanges):
    """Rank 0 gives all its rows to a slow rank 1 and gets nothing back; returns (wrong exchanges, waits for room)."""
    rank = dist.get_rank()
    fabric = HostFabric(20000, slow_rank=1)  # a place for two exchanges
    transport = OneSidedTransport(fabric, "host")
    layout = lay_out([60], 2, rank_of=[0])[0]
    plan = Plan(layout, Tasks.sorted(*np.array([[0, 0, 60, 1]]).T))
    moves = ServerRoute.of(route(plan, rank), KINDS, "cpu").q_to_server
    wrong = 0
    for number in range(exchanges):
        source = torch.full((moves.source_rows, 32), float(number))
        destination = torch.zeros(moves.destination_rows, 32)
        transport.launch((Part(source, destination, moves),)).wait()
        wrong += not bool((destination == number).all())
    return wrong, fabric.waits_for_room


def test_a_sender_that_gets_nothing_back_does_not_overwrite_what_a_slow_rank_has_yet_to_read():
    (wrong_0, waits), (wrong_1, _) = run_ranks(2, _send_only, 40)
    assert wrong_0 == wrong_1 == 0
    assert waits > 0, "the sender never waited for room, so nothing was tested"


def _too_little_memory(capacity=1024, longest=None):
    transport = OneSidedTransport(HostFabric(capacity, longest=longest), "host")
    moves = next(_exchanges(dist.get_rank(), dist.get_world_size(), 1))
    try:
        transport.launch(_parts(moves, 0, dist.get_rank()))
    except TransportError as error:
        return str(error)
    return ""


def test_too_little_memory_is_refused_on_all_ranks_alike_before_anything_is_sent():
    one, two = run_ranks(2, _too_little_memory)
    assert one == two
    assert one.startswith("`nvshmem_buffer_gb` gives")


def test_rows_that_the_fabric_cannot_write_are_refused_or_go_by_the_fallback_transport():
    row = HEADS * 5 * DTYPE.itemsize
    assert run_ranks(2, _too_little_memory, 1 << 20, row - 1) == [f"a row has {row} bytes"] * 2
    assert run_ranks(2, _too_little_memory, 1 << 20, row) == [""] * 2
    for wrong, sizes in run_ranks(2, _compare_with_fallback, 1 << 20, 10, row - 1):
        assert wrong == 0 and len(sizes) > 0
