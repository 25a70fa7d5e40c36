"""Rows that two ranks move in two hops: from the second to the first rank's server, and on to the second's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from distca.plan import RowExchange, Segments
from distca.transport import Part, RowMoves, Transport

SIZES = ((1, 1), (40, 40), (700, 333), (5000, 1), (3001, 2999))
"""Rows that the second rank sends, and the first ones of them that come back."""
WIDTH = 256


def moves_of(rank: int, rows: int, handed_on: int, device: str) -> tuple[RowMoves, RowMoves]:
    """There and back."""
    first = _exchange(rank, 1, rank * rows, rows, rows)
    relay = _exchange(rank, 0, rows, rows, handed_on)
    return RowMoves.in_hops(first, relay, 2, device)


def _exchange(rank: int, sender: int, source_rows: int, destination_rows: int, rows: int) -> RowExchange:
    some = Segments(*(np.array([each]) for each in (1 - rank, 0, 0, rows)))
    none = some.between(0, 0)
    send, receive = (some, none) if rank == sender else (none, some)
    ahead = np.zeros(2, np.int64)
    return RowExchange(source_rows, destination_rows, send, receive, none, none, none, rows, ahead, ahead, rows, rows)


def count_wrong(transport: Transport, device: str, beside: Callable[[], None] = lambda: None) -> int:
    """How many tensors are not what they should be; two exchanges are under way at a time.

    Args:
        transport: over two ranks.
        device: where rows live.
        beside: queues work behind every launch.
    """
    rank, wrong = dist.get_rank(), 0
    generator = torch.Generator().manual_seed(3)
    for rows, handed_on in SIZES:
        home, one, two = torch.randn(3, rows, WIDTH, generator=generator).bfloat16().to(device)
        there, back = moves_of(rank, rows, handed_on, device)
        kv, home_gradient = torch.full_like(home, 7), torch.zeros_like(home[: there.source_rows])
        dkv = (one, two)[rank].clone()
        forward = transport.launch((Part(home[: there.source_rows], kv, there),))
        backward = transport.launch((Part(dkv, home_gradient, back),))
        beside()
        forward.wait()
        backward.wait()
        if rank == 0:
            wrong += not torch.equal(kv, home)
        else:
            expected = one.clone()
            expected[:handed_on] = (one[:handed_on].float() + two[:handed_on].float()).bfloat16()
            wrong += not torch.equal(home_gradient, expected)
            wrong += not torch.equal(kv[:handed_on], home[:handed_on]) or not bool((kv[handed_on:] == 7).all())
    return wrong
