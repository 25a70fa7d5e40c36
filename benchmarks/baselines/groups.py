"""Context-parallel groups: neighbouring data-parallel ranks that share documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class CpGroup:
    """One rank's context-parallel group.

    Attributes:
        group: its process group.
        rank: this rank's place in it.
        size: its ranks.
        number: which group it is: data-parallel ranks [number · size, (number + 1) · size).
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    number: int


class CpGroups:
    """Makes each size of group once: every one of them holds connections and device memory.

    Args:
        data_parallel: megatron's data-parallel group.
    """

    def __init__(self, data_parallel: dist.ProcessGroup) -> None:
        self._data_parallel = data_parallel
        self._made: dict[int, CpGroup] = {}

    def of(self, size: int) -> CpGroup:
        """This rank's group of ``size`` ranks, which divides the data-parallel ranks. All ranks call it together."""
        if size not in self._made:
            self._made[size] = self._make(size)
        return self._made[size]

    def _make(self, size: int) -> CpGroup:
        mine = dist.get_process_group_ranks(self._data_parallel)
        assert len(mine) % size == 0
        number, rank = divmod(mine.index(dist.get_rank()), size)
        if size == len(mine):
            return CpGroup(self._data_parallel, rank, size, number)
        # torch wants every rank of the world to make every group, in the same order.
        everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        found: dist.ProcessGroup | None = None
        for ranks in sorted({tuple(each) for each in everyone}):
            for first in range(0, len(ranks), size):
                members = list(ranks[first : first + size])
                group = dist.new_group(members)
                if dist.get_rank() in members:
                    found = group
        assert found is not None
        return CpGroup(found, rank, size, number)
