"""Streams of several ranks in one process, which go on in any order that their events and waits allow.

Stands in for :mod:`distca.transport.cuda_ops`, with the ranks' threads as the streams that they compute on: the order
of operations that :class:`distca.transport.nvshmem.intranode.IntranodePeers` queues on GPUs is tested here in many
interleavings. So is that of :class:`distca.transport.nvshmem.internode.InternodePeers`, on a network that delivers what
it is given in any order, piece by piece.
"""

import ctypes
import random
import threading
import time
from collections import deque

import numpy as np
import torch

from distca.transport import cuda_ops
from distca.transport.nvshmem.internode import InternodeAddresses, InternodePeers, Peers
from distca.transport.nvshmem.intranode import Addresses, IntranodePeers, Sent

PATIENCE_S = 20.0


class World:
    """All ranks' streams; whoever waits lets some of them do some of their work."""

    def __init__(self, ranks, capacity, seed, staging=0):
        self.ranks, self.capacity, self.staging = ranks, capacity, staging
        self.random = random.Random(seed)
        self.streams = []
        self.lock = threading.RLock()
        self.memory = [torch.zeros(16 * ranks + capacity + staging, dtype=torch.uint8) for _ in range(ranks)]
        self.bases = [memory.data_ptr() for memory in self.memory]
        self.travelling = [[] for _ in range(ranks)]  # what each rank gave to the network, by Event

    def some_work(self, most):
        """Do up to so many operations of random streams."""
        with self.lock:
            for _ in range(most):
                ready = [stream for stream in self.streams if stream.operations]
                if ready:
                    self.random.choices(ready, [stream.speed for stream in ready])[0].advance()
                if self.random.random() < 0.02:
                    self._change_speeds()

    def all_work(self):
        """Do all that can be done."""
        with self.lock:
            while any(stream.advance() for stream in list(self.streams)):
                pass

    def _change_speeds(self):
        for stream in self.streams:
            stream.speed = self.random.choice((0.001, 0.1, 1.0))

    def until(self, condition):
        end = time.monotonic() + PATIENCE_S
        while not condition():
            self.some_work(self.random.randrange(1, 4))
            time.sleep(0)
            if time.monotonic() > end:
                raise TimeoutError("The ranks wait for each other.")

    def send(self, rank, effects, ordered=False):
        """Give something to the network, which does its effects when it pleases, and in any order."""
        with self.lock:
            arrived, packet = Event(), Packet(self)
            if not ordered:
                self.random.shuffle(effects)
            packet.operations.extend(effects)
            packet.operations.append(lambda: setattr(arrived, "done", True) or True)
            packet.speed = self.random.choice((0.001, 0.1, 1.0))
            self.travelling[rank] = [event for event in self.travelling[rank] if not event.done] + [arrived]


class Event:
    done = False

    def query(self):
        return self.done


class Stream:
    """Operations that are done in order; each says whether it is."""

    def __init__(self, world):
        self.operations, self.speed = deque(), 1.0
        world.streams.append(self)

    def wait_event(self, event):
        self.operations.append(lambda: event.done)

    def advance(self):
        """Whether an operation was done."""
        done = bool(self.operations) and self.operations[0]()
        if done:
            self.operations.popleft()
        return done


class Packet(Stream):
    """A stream that ends."""

    def __init__(self, world):
        super().__init__(world)
        self._world = world

    def advance(self):
        done = super().advance()
        if not self.operations:
            self._world.streams.remove(self)
        return done


class Here:
    """The stream that a rank computes on: its thread."""

    def __init__(self, world):
        self.world = world

    def wait_event(self, event):
        self.world.until(lambda: event.done)


class Queue:
    """What a rank queues on its streams; ``here`` is the current one, in whose place a test may put a Stream."""

    def __init__(self, world):
        self._world, self.here = world, Here(world)

    def create_stream(self, priority):
        return Stream(self._world)

    def current_stream(self):
        return self.here

    def mark(self, stream):
        event = Event()
        if isinstance(stream, Here):
            event.done = True
        else:
            stream.operations.append(lambda: setattr(event, "done", True) or True)
        return event

    def copy_rows(self, pieces, batched, stream):
        copies = [
            (source + row * width, to + place * width, rows * width)
            for source, to, ranges, width in pieces
            for row, place, rows in ranges.tolist()
        ]
        if batched:
            self._world.random.shuffle(copies)
        for source, to, size in copies:
            self._copy(source, to, size, stream)

    def push_rows(self, pieces, arrived, number, finished_blocks, most_blocks, stream):
        for rows, index, to in pieces:
            width = cuda_ops.row_bytes(rows)
            for place, row in enumerate(index.tolist()):
                self._copy(rows.data_ptr() + row * width, to + place * width, width, stream)
        self.signal(arrived, number, stream)

    def signal(self, addresses, value, stream):
        for address in addresses.tolist():
            stream.operations.append(lambda address=address: write(address, value) or True)

    def wait_for(self, addresses, value, stream):
        slots = addresses.tolist()
        stream.operations.append(lambda: all(read(address) >= value for address in slots))

    def _copy(self, source, to, size, stream):
        stream.operations.append(lambda: bool(ctypes.memmove(to, source, size)) or True)


class InternodeQueue(Queue):
    """What a rank queues for inter-node peers, whose places it names by addresses in its own memory."""

    def __init__(self, world, rank):
        super().__init__(world)
        self._rank = rank

    def put(self, to, source, size, peer, stream):
        there, half = self._there(to, peer), size // 2

        def copy(first, last):
            return lambda: bool(ctypes.memmove(there + first, source + first, last - first)) or True

        # Read when it travels: until then the source must stay as it is.
        self._send(stream, lambda: [copy(0, half), copy(half, size)])

    def quiet(self, stream):
        before = []

        def is_quiet():
            if not before:
                before.append(list(self._world.travelling[self._rank]))
            return all(event.done for event in before[0])

        stream.operations.append(is_quiet)

    def set_signal(self, slot, number, peer, stream):
        there = self._there(slot, peer)
        self._send(stream, lambda: [lambda: write(there, number) or True])

    def add_to_signal(self, slot, by, peer, stream):
        there = self._there(slot, peer)
        self._send(stream, lambda: [lambda: write(there, read(there) + by) or True])

    def wait_for_signal(self, slot, number, stream):
        stream.operations.append(lambda: read(slot) >= number)

    def _there(self, address, peer):
        return address - self._world.bases[self._rank] + self._world.bases[peer]

    def _send(self, stream, effects):
        if isinstance(stream, Here):
            self._world.send(self._rank, effects())
        else:
            stream.operations.append(lambda: self._world.send(self._rank, effects()) or True)


class Fabric:
    """A rank's memory and its peers', reached through a :class:`IntranodePeers`, those of ``far`` through a
    :class:`InternodePeers`."""

    def __init__(self, world, rank, far=()):
        self.rank, self.ranks, self._world = rank, world.ranks, world
        slots, bases = 16 * world.ranks, world.bases
        self.receive_buffer = world.memory[rank][slots : slots + world.capacity]
        self._arrived_here = cuda_ops.addresses_of(bases[rank], range(self.ranks))
        near = [peer for peer in range(self.ranks) if peer not in far]
        self._consumed_there = [bases[peer] + 8 * (self.ranks + rank) for peer in near]
        addresses = Addresses(
            [0 if peer in far else base + slots for peer, base in enumerate(bases)],
            cuda_ops.addresses_of(bases[rank], range(self.ranks, 2 * self.ranks)),
            np.array([0 if peer in far else base + 8 * rank for peer, base in enumerate(bases)], np.uint64),
        )
        self.near_queue = Queue(world)
        self.intranode = IntranodePeers(addresses, "cpu", self.near_queue)
        base = bases[rank]
        own = InternodeAddresses(
            receive_buffer=base + slots,
            staging=base + slots + world.capacity,
            staging_bytes=world.staging,
            arrived_here=base,
            arrived_there=base + 8 * rank,
            consumed_here=base + 8 * self.ranks,
            consumed_there=base + 8 * (self.ranks + rank),
        )
        self.far_queue, self._internode = InternodeQueue(world, rank), far
        self._internode_peers = InternodePeers(own, "cpu", self.far_queue) if far else None
        self._peers = Peers(self.intranode, self._internode_peers, far)
        self._beside = None

    def compute_on(self, stream):
        """Make a Stream the rank's current one."""
        self.near_queue.here = self.far_queue.here = stream

    def why_not_row(self, row_bytes):
        return None

    def put(self, number, reuses, puts):
        return self._peers.put(number, reuses, puts)

    def keep(self, parts, behind):
        return self._peers.keep(parts, behind)

    def join(self, token):
        for event in token.events if token is not None else ():
            self._world.until(lambda event=event: event.done)

    def beside(self, work):
        current = self.near_queue.here
        if self._beside is None:
            self._beside = Stream(self._world)
        self._beside.wait_event(self.near_queue.mark(current))
        self.compute_on(self._beside)
        work()
        self.compute_on(current)
        return Sent([self.near_queue.mark(self._beside)], (), (), 0)

    def compute(self, work):
        if isinstance(self.near_queue.here, Stream):
            self.near_queue.here.operations.append(lambda: work() or True)
        else:
            work()

    def arrived(self, number, peers):
        slots = self._arrived_here[list(peers)].tolist()

        def are_there():
            return all(read(slot) >= number for slot in slots)

        if isinstance(self.near_queue.here, Stream):
            self.near_queue.here.operations.append(are_there)
        else:
            self._world.until(are_there)

    def consumed(self, number):
        for address in self._consumed_there:
            write(address, number)
        if self._internode_peers is not None:
            self._internode_peers.consumed(number, self._internode)


def read(address):
    return ctypes.c_uint64.from_address(address).value


def write(address, value):
    # As on GPUs nothing holds a slot back from falling: it must be written in order.
    ctypes.c_uint64.from_address(address).value = value
