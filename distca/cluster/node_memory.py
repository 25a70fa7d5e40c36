"""Host memory that the ranks of a machine share."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch.distributed as dist

from distca.cluster.hostname import machine_name


def fullest_node(need: int, free: int, group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Returns two numbers of the machine whose free memory is needed most: bytes that its ranks need, and bytes free.

    Args:
        need: bytes of this rank.
        free: bytes of this machine.
        group: of ranks that all call it.
    """
    mine: Any = (machine_name(), need, free)
    everyone = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    nodes = [list(ranks) for _, ranks in groupby(sorted(everyone), key=lambda rank: rank[0])]
    shares = [(sum(need for _, need, _ in ranks), min(free for *_, free in ranks)) for ranks in nodes]
    return max(shares, key=lambda share: share[0] / max(share[1], 1))
