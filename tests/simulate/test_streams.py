"""Links and streams of two and three ranks, counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from distca.simulate.fabric import Fabric
from distca.simulate.streams import Streams

GB = 10**9


def fabric(ranks: int, per_node: int) -> Fabric:
    return Fabric(ranks, per_node, nvlink=100 * GB, network=10 * GB, nvlink_latency=1e-3, network_latency=2e-3)


def exchange(links: Fabric, *rows: tuple[int, int, float]):
    source, target, size = (np.array(column) for column in zip(*rows, strict=True))
    return links.exchange(source.astype(int), target.astype(int), size.astype(float))


def test_a_transfer_takes_latency_and_bytes_over_the_links_rate():
    for per_node, seconds in ((2, 1e-3 + 0.01), (1, 2e-3 + 0.1)):
        streams = Streams(fabric(2, per_node))
        streams.compute(np.array([0.5, 0.0]), "pre")
        arrival = streams.launch(exchange(streams.fabric, (0, 1, GB)), "q")
        streams.join(arrival)
        assert streams.now == pytest.approx([0.5, 0.5 + seconds])
        assert streams.waited == pytest.approx([0, 0.5])  # for rank 0 to compute
        assert streams.exposed == pytest.approx([0, seconds])  # for its bytes
        assert streams.sent.tolist() == [GB, 0]


def test_both_directions_and_both_kinds_of_link_carry_at_once():
    links = fabric(4, 2)
    streams = Streams(links)
    rows = exchange(links, (0, 1, GB), (1, 0, GB), (0, 2, GB), (2, 0, GB))
    streams.join(streams.launch(rows, "q"))
    assert streams.now == pytest.approx([0.102, 0.011, 0.102, 0])


def test_messages_of_a_rank_share_its_link():
    links = fabric(3, 1)
    streams = Streams(links)
    streams.join(streams.launch(exchange(links, (0, 1, 0.2 * GB), (0, 2, 0.8 * GB)), "k"))
    # The small one has half of the link until it is done.
    assert streams.now == pytest.approx([0, 0.002 + 0.04, 0.002 + 0.1])
    streams = Streams(links)
    streams.join(streams.launch(exchange(links, (0, 2, GB), (1, 2, GB)), "k"))
    assert streams.now[2] == pytest.approx(0.002 + 0.2)


def test_exchanges_follow_one_another_and_hide_behind_computation():
    links = fabric(2, 1)
    streams, rows = Streams(links), exchange(links, (0, 1, GB))
    first, second = streams.launch(rows, "ping"), streams.launch(rows, "pong")
    streams.compute(np.array([0.0, 0.15]), "serve")
    streams.join(first)
    assert streams.exposed[1] == 0
    streams.join(second)
    assert streams.now[1] == pytest.approx(0.202)
    assert streams.exposed[1] == pytest.approx(0.052)


def test_both_ends_of_a_rendezvous_have_to_be_there():
    links = fabric(2, 1)
    for rendezvous, arrived in ((False, 0.7), (True, 0.7 + 0.102)):
        streams = Streams(links, rendezvous=rendezvous)
        streams.compute(np.array([0.0, 0.7]), "pre")
        streams.join(streams.launch(exchange(links, (0, 1, GB)), "q"))
        assert streams.now[1] == pytest.approx(arrived)


def test_a_collective_begins_with_its_last_rank():
    streams = Streams(fabric(4, 1))
    streams.compute(np.array([0.1, 0.4, 0.2, 0.0]), "pre")
    streams.join(streams.collective(np.full(4, 0.5), np.ones(4), 2, "gather"))
    assert streams.now == pytest.approx([0.9, 0.9, 0.7, 0.7])
    assert streams.exposed == pytest.approx([0.5] * 4)
    assert streams.waited == pytest.approx([0.3, 0, 0, 0.2])


def test_nothing_travels():
    streams = Streams(fabric(2, 1))
    rows = streams.fabric.exchange(np.array([0, 1]), np.array([0, 0]), np.array([5.0, 0.0]))
    assert not rows.travels
    streams.join(streams.launch(rows, "q"))
    assert not streams.now.any()


def test_collectives_use_every_network_link_of_a_node():
    assert fabric(16, 8).ring(8) == (100 * GB, 1e-3)
    assert fabric(16, 8).ring(16) == (80 * GB, 2e-3)
    assert fabric(16, 1).ring(16) == (10 * GB, 2e-3)
    collective = replace(fabric(16, 8), nvlink_collective=50 * GB, network_collective=5 * GB)
    assert collective.ring(8) == (50 * GB, 1e-3) and collective.ring(16) == (40 * GB, 2e-3)


def test_a_second_hop_begins_when_the_rank_has_the_first_and_both_are_joined_at_once():
    links = fabric(3, 2)
    streams = Streams(links)
    streams.compute(np.array([0.0, 0.0, 0.4]), "pre")
    first, second = exchange(links, (2, 0, GB)), exchange(links, (0, 1, GB))
    arrival = streams.launch(first, "k", second=second)
    streams.compute(np.array([0.0, 0.45, 0.0]), "serve")
    streams.join(arrival)
    there = 0.4 + 0.002 + 0.1
    assert streams.now == pytest.approx([there, there + 0.001 + 0.01, 0.4])
    # Rank 1 waits for bytes alone: rank 2 had launched before it was done.
    assert streams.waited == pytest.approx([0.4, 0, 0])
    assert streams.exposed == pytest.approx([0.102, there + 0.011 - 0.45, 0])
    assert streams.sent.tolist() == [GB, 0, GB]
    assert streams.order[-3:] == ["launch k 0 ping ", "serve 0 ping ", "join k 0 ping "]
