"""Transport over torch.distributed: rows are packed, sent by one all-to-all per tensor, and put in their places.

Rows that take two hops go by a second all-to-all, once those of the first have arrived.
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
        # A group may have one backend for CPUs and one for GPUs. Rows live on GPUs where NCCL is one of them.
        self.name = "nccl" if "nccl" in str(dist.get_backend(group)) else str(dist.get_backend(group))
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._group = group
        self._newest: CollectiveHandle | None = None
        self._relaying: torch.cuda.Stream | None = None

    def launch(self, parts: tuple[Part, ...]) -> CollectiveHandle:
        """Packs and starts one all-to-all per part; parts of which no row travels between any ranks are only copied.

        On GPUs a second hop is queued at once, on a stream of its own, behind the first. Elsewhere it starts when this
        exchange is waited for, or the next one is launched.

        Raises:
            TransportError: the moves belong to a plan for another number of ranks; nothing was sent.
        """
        check_ranks(parts, self.ranks)
        if self._newest is not None:
            # All ranks must start a group's collectives in one order, though they wait at different times. So the
            # second hop of the exchange before starts before this exchange.
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
        # Kept rows are copied after the packing, so that transfers start first.
        for part in parts:
            part.moves.copy_kept(part.source, part.destination)
        return handle

    def _room(self, part: Part) -> _AllToAll:
        """The all-to-all of a part, with memory for its packed rows."""
        moves = part.moves
        sent = part.source.new_empty((len(moves.send_index), *part.source.shape[1:]))
        received = part.destination.new_empty((sum(moves.receive_counts), *part.destination.shape[1:]))
        return _AllToAll(part, sent, received, self._group)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Queues work on a stream of its own, behind all that the computation has queued so far."""
        if self._relaying is None:
            self._relaying = torch.cuda.Stream(priority=-1)
        self._relaying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._relaying):
            yield


@dataclass
class _AllToAll:
    """The all-to-all of one part. It holds the memory of packed rows until the exchange was waited for."""

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
        handed_on: all-to-alls of rows that the second hop hands on; they start now and end before it starts.
        others: all-to-alls without a second hop, which start now too.
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
        """The pending collectives, for whoever records when they end."""
        return [each.work for each in self._under_way if each.work is not None]

    def tell(self, ended: Callable[[], None]) -> None:
        """Calls ``ended``, from a thread of gloo, whenever one of the collectives ends, those of a second hop too."""
        self._ended = ended
        for each in self._under_way:
            each.tell(ended)

    def hand_on(self) -> None:
        """Starts the second hop on the current stream, once the rows that it hands on are there; does nothing where
        there is none, or it was started."""
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
        # The second hop's all-to-alls have waited for those of rows that they hand on, so these need no further wait.
        for each in self._under_way:
            each.finish()
        self._handed_on, self._others, self._under_way = [], [], []


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """[rows, bytes per row] uint8: one wire format for every dtype, also for those that gloo does not know."""
    return rows.view(-1).view(torch.uint8).view(len(rows), row_bytes(rows))


def nccl_goes_first() -> None:
    """Makes kernels of NCCL start before queued computation; call it before any process group is made.

    A GPU gives its multiprocessors to kernels of equal priority in the order in which they come. A long document's core
    attention occupies all of them for up to seconds. A collective may begin just before it on one rank, and only after
    it on another. On the first it then spins until the second rank's attention ends, on multiprocessors that the first
    rank's attention lacks. Where TORCH_NCCL_HIGH_PRIORITY is set already, it stays.
    """
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
