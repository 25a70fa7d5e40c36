"""Transport over torch.distributed: pack the rows, one all-to-all per tensor, put them in their places."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distca.errors import TransportError
from distca.transport.cuda_ops import row_bytes
from distca.transport.gather_scatter import move_rows
from distca.transport.interface import Part


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

    def launch(self, parts: tuple[Part, ...]) -> CollectiveHandle:
        """Pack and start one all-to-all per part; parts of which no row travels between any ranks are only copied.

        Raises:
            TransportError: the moves belong to a plan for another number of ranks; nothing was sent.
        """
        under_way = []
        for part in parts:
            if len(part.moves.send_counts) != self.ranks:
                raise TransportError(
                    f"The plan was made for {len(part.moves.send_counts)} ranks, but the server pool has {self.ranks}; "
                    "plan again for this world size."
                )
            if part.moves.travelling:
                under_way.append(self._start(part))
        # Copies of kept rows are queued behind the packing, so that the transfers start first.
        for part in parts:
            part.moves.copy_kept(part.source, part.destination)
        return CollectiveHandle(under_way)

    def _start(self, part: Part) -> _UnderWay:
        moves = part.moves
        sent = part.source.new_empty((len(moves.send_index), *part.source.shape[1:]))
        move_rows(part.source, moves.send_index, sent, None)
        received = part.destination.new_empty((sum(moves.receive_counts), *part.destination.shape[1:]))
        work = dist.all_to_all_single(
            _as_bytes(received),
            _as_bytes(sent),
            moves.receive_counts,
            moves.send_counts,
            group=self._group,
            async_op=True,
        )
        return _UnderWay(part, sent, received, work)


@dataclass
class _UnderWay:
    part: Part
    sent: torch.Tensor  # held until the exchange was waited for
    received: torch.Tensor
    work: dist.Work


class CollectiveHandle:
    """All-to-alls under way."""

    def __init__(self, under_way: list[_UnderWay]) -> None:
        self._under_way = under_way

    @property
    def works(self) -> list[dist.Work]:
        """The pending collectives, for whoever records when they end."""
        return [each.work for each in self._under_way]

    def wait(self) -> None:
        for each in self._under_way:
            each.work.wait()
            each.part.moves.place_received(each.received, each.part.destination)
        self._under_way = []


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """[rows, bytes per row]: one wire format for every dtype, also those that gloo does not know."""
    return rows.view(-1).view(torch.uint8).view(len(rows), row_bytes(rows))


def nccl_goes_first() -> None:
    """Let kernels of NCCL start before computation that is queued too; call it before any process group is made.

    A GPU gives its multiprocessors to kernels of equal priority as they come, and a long document's core attention
    occupies all of them for up to seconds. A collective that begins just before it on one rank and just after it on
    another then spins on the first until the second is through, on multiprocessors that its attention lacks. Where the
    variable is set already, it stays.
    """
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
