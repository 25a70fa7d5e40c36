"""What a model's forward needs to know of its micro-batch beyond tokens; travels in place of the attention mask.

megatron-core hands ``attention_mask`` through to every layer's core attention and to the block unread, so an object in
its place reaches them without changing a signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distca.attention import TaskBatch
from distca.runtime import NanoRoutes


@dataclass(frozen=True)
class DisaggregatedMicroBatch:
    """A micro-batch whose core attention is disaggregated.

    Attributes:
        routes: this rank's routes, one per nano-batch.
        nano_rows: padded home rows of each nano-batch.
        chunks: tensor-parallel ranks that share the sequence; the micro-batch's rows are ordered so that each of their
            contiguous shares holds its part of every nano-batch.
    """

    routes: Sequence[NanoRoutes]
    nano_rows: Sequence[int]
    chunks: int


@dataclass(frozen=True)
class PackedMicroBatch:
    """A micro-batch of whole documents whose core attention stays at home.

    Attributes:
        batch: borders of the documents.
        rows: rows that belong to documents; rows beyond them are padding.
    """

    batch: TaskBatch
    rows: int


def gather_nano_rows(x: torch.Tensor, nano_rows: Sequence[int], chunks: int) -> list[torch.Tensor]:
    """Undo the interleaving over sequence-parallel shares.

    Args:
        x: [sum(nano_rows), ...] rows in micro-batch order.
        nano_rows: rows of each nano-batch, multiples of ``chunks``.
        chunks: sequence-parallel shares.

    Returns:
        One [rows, ...] tensor per nano-batch.
    """
    sizes = [rows // chunks for rows in nano_rows] * chunks
    pieces = x.split(sizes)
    return [torch.cat(pieces[nano :: len(nano_rows)]) for nano in range(len(nano_rows))]
