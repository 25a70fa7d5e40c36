"""Streams of several ranks in one process, which go on in any order that their events and waits allow.

Stands in for :mod:`distca.transport.native`, with the ranks' threads as the streams that they compute on: the order of
operations that :class:`distca.transport.writer.Writer` queues on GPUs is tested here in many interleavings.
"""

import ctypes
import random
import threading
import time
from collections import deque

import numpy as np
import torch

from distca.transport import native
from distca.transport.writer import Addresses, Writer

PATIENCE_S = 20.0


class World:
    """All ranks' streams; whoever waits lets some of them do some of their work."""

    def __init__(self, ranks, capacity, seed):
        self.ranks = ranks
        self.random = random.Random(seed)
        self.streams = []
        self.lock = threading.Lock()
        self.memory = [torch.zeros(16 * ranks + capacity, dtype=torch.uint8) for _ in range(ranks)]

    def some_work(self, most):
        """Do up to so many operations of random streams."""
        with self.lock:
            for _ in range(most):
                ready = [stream for stream in self.streams if stream.operations]
                if ready:
                    self.random.choices(ready, [stream.speed for stream in ready])[0].advance()
                if self.random.random() < 0.02:
                    self._change_speeds()

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


class Event:
    done = False


class Stream:
    """Operations that are done in order; each says whether it is."""

    def __init__(self, world):
        self.operations, self.speed = deque(), 1.0
        world.streams.append(self)

    def wait_event(self, event):
        self.operations.append(lambda: event.done)

    def advance(self):
        if self.operations[0]():
            self.operations.popleft()


class Here:
    """The stream that a rank computes on: its thread."""

    def __init__(self, world):
        self.world = world

    def wait_event(self, event):
        self.world.until(lambda: event.done)


class Queue:
    """What a rank queues on its streams."""

    def __init__(self, world):
        self._world, self._here = world, Here(world)

    def create_stream(self, priority):
        return Stream(self._world)

    def current_stream(self):
        return self._here

    def mark(self, stream):
        event = Event()
        if stream is self._here:
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
            width = native.row_bytes(rows)
            for place, row in enumerate(index.tolist()):
                self._copy(rows.data_ptr() + row * width, to + place * width, width, stream)
        self.signal(arrived, number, stream)

    def signal(self, addresses, value, stream):
        for address in addresses.tolist():
            stream.operations.append(lambda address=address: write(address, value) or True)

    def wait_for(self, addresses, value, stream):
        words = addresses.tolist()
        stream.operations.append(lambda: all(read(address) >= value for address in words))

    def _copy(self, source, to, size, stream):
        stream.operations.append(lambda: bool(ctypes.memmove(to, source, size)) or True)


class Fabric:
    """A rank's memory and its peers', reached through a :class:`Writer`."""

    def __init__(self, world, rank):
        self.rank, self.ranks, self._world = rank, world.ranks, world
        words = 16 * world.ranks
        self.landing = world.memory[rank][words:]
        bases = [memory.data_ptr() for memory in world.memory]
        self._arrived_here = native.addresses_of(bases[rank], range(self.ranks))
        self._taken_there = [base + 8 * (self.ranks + rank) for base in bases]
        addresses = Addresses(
            [base + words for base in bases],
            native.addresses_of(bases[rank], range(self.ranks, 2 * self.ranks)),
            np.array([base + 8 * rank for base in bases], np.uint64),
        )
        self.writer = Writer(addresses, "cpu", Queue(world))

    def put(self, number, reuses, puts):
        return self.writer.put(number, reuses, puts)

    def keep(self, parts, behind):
        return self.writer.keep(parts, behind)

    def join(self, token):
        for event in token.events if token is not None else ():
            self._world.until(lambda event=event: event.done)

    def arrived(self, number, peers):
        words = self._arrived_here[list(peers)].tolist()
        self._world.until(lambda: all(read(word) >= number for word in words))

    def taken(self, number):
        for address in self._taken_there:
            write(address, number)


def read(address):
    return ctypes.c_uint64.from_address(address).value


def write(address, value):
    # As on GPUs nothing holds a word back from falling: it must be written in order.
    ctypes.c_uint64.from_address(address).value = value
