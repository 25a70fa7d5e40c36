"""Transport over torch.distributed (NCCL on GPUs, gloo on CPUs).

An *exchange* moves rows of several tensors, its *parts*, between all ranks. Each part takes one all-to-all, or two if
the part has two *hops* (:class:`distca.transport.interface.Hops`). A part takes none if all rows stay on their ranks.
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
    """Moves rows by all-to-all over ``group``, the process group of all ranks that exchange rows."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # A group may have both gloo for CPU tensors and NCCL for GPU tensors. On such a group, rows are on GPUs.
        self.name = "nccl" if "nccl" in str(dist.get_backend(group)) else str(dist.get_backend(group))
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._group = group
        self._newest: CollectiveHandle | None = None
        self._second_hop_stream: torch.cuda.Stream | None = None

    def launch(self, parts: tuple[Part, ...]) -> CollectiveHandle:
        """Starts the exchange, and copies rows that stay on this rank.

        Raises:
            TransportError: ``parts`` are for another number of ranks; nothing was sent.
        """
        check_ranks(parts, self.ranks)
        if self._newest is not None:
            # All ranks must start collectives in the same order, so the previous exchange's second hop must start
            # before this exchange.
            self._newest.hand_on()
            self._newest = None
        hops = Hops.of(parts)
        handed_on, others, second = (
            [self._all_to_all(part) for part in some] for some in (hops.handed_on, hops.others, hops.second)
        )
        handle = CollectiveHandle(handed_on, others, second)
        if hops.second and hops.second[0].source.is_cuda:
            with self._on_second_hop_stream():
                handle.hand_on()
        elif hops.second:
            self._newest = handle
        # These copies come after the start of the all-to-alls, so that the copies run while other rows travel.
        for part in parts:
            part.moves.copy_kept(part.source, part.destination)
        return handle

    def _all_to_all(self, part: Part) -> _AllToAll:
        moves = part.moves
        sent = part.source.new_empty((len(moves.send_index), *part.source.shape[1:]))
        received = part.destination.new_empty((sum(moves.receive_counts), *part.destination.shape[1:]))
        return _AllToAll(part, sent, received, self._group)

    @contextmanager
    def _on_second_hop_stream(self) -> Iterator[None]:
        if self._second_hop_stream is None:
            self._second_hop_stream = torch.cuda.Stream(priority=-1)
        self._second_hop_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._second_hop_stream):
            yield


@dataclass
class _AllToAll:
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
    """The all-to-alls of an exchange; the constructor starts the first hop.

    Args:
        handed_on, second: the first and the second hops of parts with two hops.
        others: the parts with one hop.
    """

    def __init__(self, handed_on: list[_AllToAll], others: list[_AllToAll], second: list[_AllToAll]) -> None:
        self._handed_on, self._others, self._second = handed_on, others, second
        self._under_way = handed_on + others
        self._ended: Callable[[], None] | None = None
        for each in self._under_way:
            each.start()

    @property
    def works(self) -> list[dist.Work]:
        return [each.work for each in self._under_way if each.work is not None]

    def tell(self, ended: Callable[[], None]) -> None:
        """Makes a thread of gloo call ``ended`` each time a collective of this exchange ends; on CPUs only."""
        self._ended = ended
        for each in self._under_way:
            each.tell(ended)

    def hand_on(self) -> None:
        """Waits for the first hop and starts the second, unless the second has started or there is none."""
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
        for each in self._under_way:
            each.finish()
        self._handed_on, self._others, self._under_way = [], [], []


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """Returns a view [rows, bytes per row] uint8, because gloo does not support all dtypes."""
    return rows.view(-1).view(torch.uint8).view(len(rows), row_bytes(rows))


def nccl_goes_first() -> None:
    """Gives NCCL's kernels a high stream priority; must be called before any process group is made.

    With equal priority, a collective may wait seconds until attention of a long document ends. If the environment sets
    TORCH_NCCL_HIGH_PRIORITY, its value stays.
    """
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
