"""Brings one rank's rows of a micro-batch to its device, with the object that a model gets in place of a mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from distca.attention import TaskBatch
from distca.data.batch import RankBatch
from distca.device.host_to_device import Upload
from distca.errors import PlanError
from distca.plan import Layout, PlanOptions
from megatron_patches.steps.batch_context import DisaggregatedMicroBatch, PackedMicroBatch


@dataclass(frozen=True)
class Batch:
    """One rank's rows of a micro-batch, on the rank's device.

    Attributes:
        tokens: [1, rows] int64 token ids.
        labels: [1, rows] int64 next token of the same document.
        loss_mask: [1, rows] bool, whether the row's label counts in the loss; or float32, its weight in the loss, if
            documents have weights. It is 0 for padding, a document's last token and labels that are not to be learned.
        positions: [1, rows] int64 position in the document.
        documents: [1, rows] int64 number of the document in the micro-batch; -1 in padding.
        attention: the object that a model gets in place of the attention mask.
        micro_batch_lengths: [documents] int64 lengths of all ranks' documents of the micro-batch; in host memory.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor
    attention: DisaggregatedMicroBatch | PackedMicroBatch
    micro_batch_lengths: np.ndarray


def batch_on_device(
    upload: Upload,
    rows: RankBatch,
    attention: DisaggregatedMicroBatch | PackedMicroBatch,
    *,
    lengths: bool = False,
) -> Batch:
    """Returns a rank's rows of a micro-batch as tensors, which have their values once ``upload`` is sent.

    Args:
        lengths: whether ``attention`` also gets the length of every row's document.
    """
    columns = (rows.tokens, rows.labels, rows.loss_mask, rows.positions, rows.documents)
    tokens, labels, loss_mask, positions, numbers = (upload.add(column)[None] for column in columns)
    if lengths:
        attention = replace(attention, document_lengths=upload.add(rows.lengths))
    attention = replace(attention, documents=numbers[0], document_count=len(rows.micro_batch_lengths))
    return Batch(tokens, labels, loss_mask, positions, numbers, attention, rows.micro_batch_lengths)


def packed_batches(
    rows: Sequence[RankBatch],
    attention: Sequence[PackedMicroBatch],
    options: PlanOptions,
    upload: Upload,
    *,
    lengths: bool = False,
) -> tuple[Batch, ...]:
    columns = with_equal_rows(rows) if options.stages > 1 else rows
    return tuple(batch_on_device(upload, *each, lengths=lengths) for each in zip(columns, attention, strict=True))


def packed_attention(layout: Layout, rank: int, upload: Upload) -> PackedMicroBatch:
    """Returns the attention object of a rank that has whole documents only.

    Raises:
        PlanError: a document of the layout spans ranks, even if none of them is ``rank``.
    """
    parts = layout.q  # ranges [start, stop) of documents, each on one rank
    cut = parts.document[(parts.start > 0) | (parts.stop < layout.last[parts.document])]
    if len(cut):
        raise PlanError(
            f"Document {cut[0]} of a micro-batch, of {layout.last[cut[0]]:,} tokens, spans data-parallel ranks, but "
            "`disaggregate` is False, so every document has to stay on one rank: give documents homes "
            "(distca.StepDocuments), or set `disaggregate` to True."
        )
    mine = parts.on_rank(rank)
    borders = np.concatenate(([0], np.cumsum(mine.stop)))  # queries and keys have the same borders: documents are whole
    return PackedMicroBatch(TaskBatch.of(borders, borders, upload), int(borders[-1]))


def with_equal_rows(batches: Sequence[RankBatch]) -> list[RankBatch]:
    """Pads all micro-batches of a rank to as many rows as the largest has.

    With unequal numbers, pipeline stages would have to send each tensor's shape first, and the host to wait for it.
    """
    assert all(len(batch.nano_rows) == 1 for batch in batches), "rows are added after the only nano-batch"
    rows = max(batch.nano_rows[0] for batch in batches)

    def padded(column: np.ndarray, value: int = 0) -> np.ndarray:
        return np.pad(column, (0, rows - len(column)), constant_values=value)

    return [
        replace(
            batch,
            tokens=padded(batch.tokens),
            labels=padded(batch.labels),
            loss_mask=padded(batch.loss_mask),
            positions=padded(batch.positions),
            lengths=padded(batch.lengths),
            documents=padded(batch.documents, -1),
            nano_rows=(rows,),
        )
        for batch in batches
    ]
