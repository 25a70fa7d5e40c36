"""Figures of rows, such as losses, by document; and figures of documents by row. A rank has only some rows of a
document, in the order of its plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from distca.errors import PlanError
from megatron_patches.steps.step import Batch, Step


def gather_documents(step: Step, values: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns figures of all rows of a step by micro-batch and document, on every data-parallel rank; all ranks call
    it.

    Args:
        step: the step that was run.
        values: by micro-batch, [1, rows] of this rank; empty on pipeline stages without them.

    Returns:
        By micro-batch and document of n tokens, [n] figures in the order of its tokens; empty on those stages.
    """
    gathered = []
    for batch, mine, documents in zip(step.batches, values, step.documents.micro_batches, strict=False):
        lengths = [len(document) for document in documents]
        whole = mine.new_zeros(sum(lengths))
        places, here = _places(batch, lengths)
        whole[places[here]] = mine.detach().flatten()[here]
        dist.all_reduce(whole, group=parallel_state.get_data_parallel_group())
        gathered.append(list(whole.split(lengths)))
    return gathered


def rows_of(batch: Batch, documents: Sequence[torch.Tensor | np.ndarray | Sequence[float]]) -> torch.Tensor:
    """[1, rows] figures of a rank's rows; 0 in padding.

    Args:
        batch: the rank's rows.
        documents: by document of the micro-batch, [n] figures for its n tokens, in their order, all on one device.
            Documents are in the order of ``step.documents``, in which a plan may have dealt them anew.

    Raises:
        PlanError: there is not a row of figures for each document, or not a figure for each of its tokens.
    """
    try:
        figures = [torch.as_tensor(document) for document in documents]
    except (TypeError, ValueError, RuntimeError):  # words, lists of several lengths
        figures = []
    if len(figures) != len(documents) or any(each.ndim != 1 for each in figures):
        raise PlanError("rows_of takes a list with a row of figures for each document, one for each of its tokens.")
    lengths, given = batch.micro_batch_lengths.tolist(), [len(each) for each in figures]
    if given != lengths:
        if len(given) != len(lengths):
            differs = f"{len(given)} documents, and the micro-batch has {len(lengths)}"
        else:
            number = next(i for i, pair in enumerate(zip(given, lengths, strict=True)) if len(set(pair)) > 1)
            differs = f"{given[number]} tokens for document {number}, which has {lengths[number]}"
        raise PlanError(
            f"rows_of was given figures of {differs}. Give one for each token, and documents in the order of "
            "step.documents: plans deal them over micro-batches anew, unless CAD has deal=False."
        )
    places, here = _places(batch, lengths)
    whole = (torch.cat(figures) if figures else torch.zeros(0)).to(batch.tokens.device)  # one copy for all
    rows = whole.new_zeros(len(here))
    rows[here] = whole[places[here]]
    return rows[None]


def _places(batch: Batch, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows] the place of each row among all tokens of the micro-batch, document after document; and [rows] bool
    whether the row is a token, not padding."""
    numbers, positions = batch.documents.flatten(), batch.positions.flatten()
    starts = torch.tensor([0, *lengths], device=numbers.device).cumsum(0)
    here = numbers >= 0
    return starts[numbers.clamp(min=0)] + positions, here
