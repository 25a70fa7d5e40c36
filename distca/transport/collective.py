"""Transport over torch.distributed: pack the rows, one all-to-all per tensor, put them in their places.

What goes in two hops takes a second all-to-all, behind the first one's rows.
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
    """Rows by all-to-all over a process group (NCCL on GPUs, gloo on CPUs).

    Args:
        group: the server pool; ranks in it are the ranks of plans and routes.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # A group may have a backend for each kind of device; rows live on GPUs where NCCL is one of them.
        self.name = "nccl" if "nccl" in str(dist.get_backend(group)) else str(dist.get_backend(group))
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._group = group
        self._newest: CollectiveHandle | None = None
        self._relaying: torch.cuda.Stream | None = None

    def launch(self, parts: tuple[Part, ...]) -> CollectiveHandle:
        """Pack and start one all-to-all per part; parts of which no row travels between any ranks are only copied. On
        GPUs a second hop is queued at once, on a stream of its own behind the first; elsewhere it starts when this
        exchange is waited for, or the next one is launched.

        Raises:
            TransportError: the moves belong to a plan for another number of ranks; nothing was sent.
        """
        check_ranks(parts, self.ranks)
        if self._newest is not None:
            # A group's collectives are started in one order on all ranks, which wait at different times.
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
        # Copies of kept rows are queued behind the packing, so that the transfers start first.
        for part in parts:
            part.moves.copy_kept(part.source, part.destination)
        return handle

    def _room(self, part: Part) -> _AllToAll:
        moves = part.moves
        sent = part.source.new_empty((len(moves.send_index), *part.source.shape[1:]))
        received = part.destination.new_empty((sum(moves.receive_counts), *part.destination.shape[1:]))
        return _AllToAll(part, sent, received, self._group)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Queue on a stream that the computation does not wait for, behind what it queued so far."""
        if self._relaying is None:
            self._relaying = torch.cuda.Stream(priority=-1)
        self._relaying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._relaying):
            yield


@dataclass
class _AllToAll:
    """The all-to-all of one part. Its memory is held until the exchange was waited for."""

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
    """All-to-alls under way.

    Args:
        handed_on: all-to-alls to start now, which must end before the second ones start.
        others: those to start now beside them.
        second: those that follow.
    """

    def __init__(self, handed_on: list[_AllToAll], others: list[_AllToAll], second: list[_AllToAll]) -> None:
        self._handed_on, self._others, self._second = handed_on, others, second
        self._under_way = handed_on + others
        self._ended: Callable[[], None] | None = None
        for each in self._under_way:
            each.start()

    @property
    def works(self) -> list[dist.Work]:
        """The pending collectives, for whoever records when they end."""
        return [each.work for each in self._under_way if each.work is not None]

    def tell(self, ended: Callable[[], None]) -> None:
        """Call ``ended`` from a thread of gloo when any of the collectives has ended, also of later ones."""
        self._ended = ended
        for each in self._under_way:
            each.tell(ended)

    def hand_on(self) -> None:
        """Start the second hop, if there is one that was not started, on the current stream behind the rows that it
        hands on."""
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
        # What waits for the second hop's all-to-alls waits for all that they waited for.
        for each in self._under_way:
            each.finish()
        self._handed_on, self._others, self._under_way = [], [], []


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """[rows, bytes per row]: one wire format for every dtype, also those that gloo does not know."""
    return rows.view(-1).view(torch.uint8).view(len(rows), row_bytes(rows))


def nccl_goes_first() -> None:
    """Let kernels of NCCL start before computation that is queued too; call it before any process group is made.

    A GPU gives its multiprocessors to kernels of equal priority as they come. A long document's core attention occupies
    all of them for up to seconds. A collective may begin just before it on one rank and just after it on another. It
    then spins on the first until the second is through, on multiprocessors that the first rank's attention lacks. Where
    the variable is set already, it stays.
    """
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
