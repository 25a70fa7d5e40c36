"""Transport over torch.distributed (NCCL on GPUs, gloo on CPUs): one all-to-all for each tensor of an exchange.

Rows are copied into a packed send tensor, sent, and copied from a packed receive tensor to their places. Between nodes
keys and values take two hops: to one rank of a node, the *gateway*, which hands them on to the node's other ranks. The
second hop is a second all-to-all, which starts once the first has arrived. ``select.py`` chooses this transport unless
NVSHMEM can be used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distca.transport.cuda_ops import row_bytes
from distca.transport.gather_scatter import move_rows
from distca.transport.interface import Hops, Part, check_ranks


class CollectiveTransport:
    """Moves rows by all-to-all over a process group.

    Args:
        group: the pool's process group; its ranks are the ranks that plans name.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # A group may have one backend for CPUs and one for GPUs. If NCCL is one of them, rows are on GPUs.
        self.name = "nccl" if "nccl" in str(dist.get_backend(group)) else str(dist.get_backend(group))
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._group = group
        self._newest: CollectiveHandle | None = None
        self._relaying: torch.cuda.Stream | None = None

    def launch(self, parts: tuple[Part, ...]) -> CollectiveHandle:
        """Packs and starts one all-to-all per part. A part without a row that travels in the pool is only copied.

        On GPUs a second hop is queued at once, on a stream of its own, behind the first. On CPUs it starts when the
        caller waits for this exchange or launches the next one.

        Raises:
            TransportError: the moves were planned for another number of ranks; nothing was sent.
        """
        check_ranks(parts, self.ranks)
        if self._newest is not None:
            # All ranks must start a group's collectives in one order, but they wait at different times. So the second
            # hop of the last exchange starts now, even if its caller has not waited for it yet.
            self._newest.hand_on()
            self._newest = None
        hops = Hops.of(parts)
        handed_on, others, second = (
            [self._room(part) for part in some] for some in (hops.handed_on, hops.others, hops.second)
        )
        handle = CollectiveHandle(handed_on, others, second)
        if hops.second and hops.second[0].source.is_cuda:
            with self._beside():
                handle.hand_on()
        elif hops.second:
            self._newest = handle
        # Rows that stay on this rank are copied last, so that transfers start first.
        for part in parts:
            part.moves.copy_kept(part.source, part.destination)
        return handle

    def _room(self, part: Part) -> _AllToAll:
        """The all-to-all of a part, with new send and receive tensors for its packed rows."""
        moves = part.moves
        sent = part.source.new_empty((len(moves.send_index), *part.source.shape[1:]))
        received = part.destination.new_empty((sum(moves.receive_counts), *part.destination.shape[1:]))
        return _AllToAll(part, sent, received, self._group)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Makes a side stream the current one, behind all work that the current stream has so far."""
        if self._relaying is None:
            self._relaying = torch.cuda.Stream(priority=-1)
        self._relaying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._relaying):
            yield


@dataclass
class _AllToAll:
    """The all-to-all of one part. It keeps the packed rows alive until the caller has waited for the exchange."""

    part: Part
    sent: torch.Tensor
    received: torch.Tensor
    group: dist.ProcessGroup
    work: dist.Work | None = None

    def start(self) -> None:
        moves = self.part.moves
        move_rows(self.part.source, moves.send_index, self.sent, None)
        self.work = dist.all_to_all_single(
            _as_bytes(self.received),
            _as_bytes(self.sent),
            moves.receive_counts,
            moves.send_counts,
            group=self.group,
            async_op=True,
        )

    def tell(self, ended: Callable[[], None]) -> None:
        assert self.work is not None
        self.work.get_future().add_done_callback(lambda _: ended())

    def finish(self) -> None:
        assert self.work is not None
        self.work.wait()
        self.part.moves.place_received(self.received, self.part.destination)


class CollectiveHandle:
    """The all-to-alls of an exchange; the constructor starts those of the first hop.

    Args:
        handed_on: all-to-alls whose rows the second hop sends on.
        others: all-to-alls of parts that have one hop.
        second: all-to-alls of the second hop.
    """

    def __init__(self, handed_on: list[_AllToAll], others: list[_AllToAll], second: list[_AllToAll]) -> None:
        self._handed_on, self._others, self._second = handed_on, others, second
        self._under_way = handed_on + others
        self._ended: Callable[[], None] | None = None
        for each in self._under_way:
            each.start()

    @property
    def works(self) -> list[dist.Work]:
        """The pending collectives, whose ends the timeline records."""
        return [each.work for each in self._under_way if each.work is not None]

    def tell(self, ended: Callable[[], None]) -> None:
        """Lets a thread of gloo call ``ended`` after each collective of both hops; the last call marks the end."""
        self._ended = ended
        for each in self._under_way:
            each.tell(ended)

    def hand_on(self) -> None:
        """Waits for the rows that the second hop sends on, and starts it on the current stream.

        Does nothing without a second hop, or if it was started before."""
        if not self._second:
            return
        for each in self._handed_on:
            each.finish()
        for each in self._second:
            each.start()
            if self._ended is not None:
                each.tell(self._ended)
        self._under_way, self._second = self._others + self._second, []

    def wait(self) -> None:
        self.hand_on()
        # The all-to-alls in ``_handed_on`` were waited for when the second hop started.
        for each in self._under_way:
            each.finish()
        self._handed_on, self._others, self._under_way = [], [], []


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """[rows, bytes per row] uint8 view, so that gloo can send dtypes that it does not support."""
    return rows.view(-1).view(torch.uint8).view(len(rows), row_bytes(rows))


def nccl_goes_first() -> None:
    """Gives NCCL's kernels a high stream priority; call it before any process group is made.

    A GPU runs kernels of equal priority in the order in which they come. Core attention of a long document fills all
    multiprocessors for up to seconds. Suppose that a collective starts just before it on rank 0, but behind it on rank
    1. On rank 0 the collective then spins until rank 1's attention ends, and takes multiprocessors from rank 0's own
    attention. With high priority it starts early on both. A TORCH_NCCL_HIGH_PRIORITY that is set already stays.
    """
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
