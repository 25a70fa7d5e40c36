"""Brings figures of single tokens, such as losses, from ranks' order to documents' order, and back.

A *row* of a rank is a token that the rank holds. The plan chooses the rows of each rank and their order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from distca.errors import PlanError
from megatron_patches.steps.device_batch import Batch
from megatron_patches.steps.step import Step


def gather_documents(step: Step, values: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns the figures of all documents of a step, the same on every data-parallel rank.

    All ranks must call this together.

    Args:
        values: for each micro-batch [1, rows], a figure for each row of this rank; empty on pipeline stages without
            figures.

    Returns:
        For each micro-batch of ``step.documents`` a list with one tensor [n] for each document of n tokens: a figure
        for each token, in order. Empty if ``values`` is empty.

    Raises:
        PlanError: there are figures for some micro-batches only.
    """
    if not values:
        return []
    if len(values) != len(step.batches):
        raise PlanError(
            f"Figures are given for {len(values)} micro-batches, and the step has {len(step.batches)}: give them for "
            "all, or for none on a stage without figures."
        )
    gathered = []
    for batch, mine, documents in zip(step.batches, values, step.documents.micro_batches, strict=True):
        lengths = [len(document) for document in documents]
        # Every rank fills in its tokens and leaves 0 elsewhere, so the sum over ranks has all figures.
        whole = mine.new_zeros(sum(lengths))
        places, here = _places(batch, lengths)
        whole[places[here]] = mine.detach().flatten()[here]
        dist.all_reduce(whole, group=parallel_state.get_data_parallel_group())
        gathered.append(list(whole.split(lengths)))
    return gathered


def rows_of(batch: Batch, documents: Sequence[torch.Tensor | np.ndarray | Sequence[float]]) -> torch.Tensor:
    """Returns [1, rows], a figure for each row of this rank; 0 in padding.

    Args:
        documents: for each document of the micro-batch [n], a figure for each of its n tokens, all on one device.
            Documents must be in the order of ``step.documents``. A plan may have changed the order that CAD was given.

    Raises:
        PlanError: ``documents`` are not lists of figures, or have the wrong number or lengths.
    """
    try:
        # A copy, because torch refuses reversed arrays, such as np.cumsum(rewards[::-1])[::-1].
        figures = [torch.as_tensor(each.copy() if isinstance(each, np.ndarray) else each) for each in documents]
    except (TypeError, ValueError, RuntimeError):  # not a list, or texts or unequal lists in it
        figures = None
    if figures is None or any(each.ndim != 1 for each in figures):
        raise PlanError("rows_of takes a list with one list of figures for each document, one figure for each token.")
    lengths, given = batch.micro_batch_lengths.tolist(), [len(each) for each in figures]
    if given != lengths:
        if len(given) != len(lengths):
            differs = f"{len(given)} documents, and the micro-batch has {len(lengths)}"
        else:
            number = next(i for i, pair in enumerate(zip(given, lengths, strict=True)) if len(set(pair)) > 1)
            differs = f"{given[number]} tokens for document {number}, which has {lengths[number]}"
        raise PlanError(
            f"rows_of was given figures of {differs}. Give one figure for each token, and documents in the order of "
            "step.documents: plans move documents to other micro-batches, unless CAD has deal=False."
        )
    places, here = _places(batch, lengths)
    whole = (torch.cat(figures) if figures else torch.zeros(0)).to(batch.tokens.device)
    rows = whole.new_zeros(len(here))
    rows[here] = whole[places[here]]
    return rows[None]


def _places(batch: Batch, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each row's place among all documents' tokens, one after the other, and whether the row is no padding.

    Example: documents have 3 and 4 tokens. This rank has token 2 of document 0, token 1 of document 1, and a padding
    row. The results are [2, 4, 0] and [True, True, False].
    """
    numbers, positions = batch.documents.flatten(), batch.positions.flatten()
    starts = torch.tensor([0, *lengths], device=numbers.device).cumsum(0)
    here = numbers >= 0
    return starts[numbers.clamp(min=0)] + positions, here
