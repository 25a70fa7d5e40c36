"""The documents of a step, as a caller gives them, and whether they can be such."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distca.data.batch import Document
from distca.errors import PlanError


@dataclass(frozen=True)
class StepDocuments:
    """The documents of one step, the same on every rank.

    Attributes:
        micro_batches: by micro-batch, its documents; a document is anything with a length and slices of token ids.
        homes: by micro-batch, [documents] the data-parallel rank on which each stays whole; None lets documents span
            ranks.
        note: anything the caller wants to find again at the step.
        weights: by micro-batch, [documents] what each target of a document weighs in the loss; None weighs all alike.
    """

    micro_batches: Sequence[Sequence[Document]]
    homes: Sequence[np.ndarray | None] | None = None
    note: Any = None
    weights: Sequence[np.ndarray] | None = None


def listed(given: StepDocuments | Sequence[Sequence[Document]]) -> StepDocuments:
    """The same in lists, of which every rank can read all again.

    Raises:
        PlanError: something is no micro-batch or no document; homes or weights are not one for each document; a weight
            is negative or no number.
    """
    documents = given if isinstance(given, StepDocuments) else StepDocuments(given)
    try:
        micro_batches = [list(each) for each in documents.micro_batches]
    except TypeError as error:
        raise PlanError(f"A step is a list of micro-batches, and each a list of documents ({error}).") from None
    for number, micro_batch in enumerate(micro_batches):
        if any(not hasattr(document, "__len__") or getattr(document, "ndim", 1) == 0 for document in micro_batch):
            raise PlanError(f"Micro-batch {number} has numbers in place of documents; give each as a list of them.")
        if any(
            isinstance(document, Mapping | str | bytes) or getattr(document, "ndim", 1) > 1 for document in micro_batch
        ):
            raise PlanError(f"Micro-batch {number} has a document that is no row of token ids; give its ids alone.")
    homes, weights = (
        None if values is None else _by_document(name, values, micro_batches)
        for name, values in (("homes", documents.homes), ("weights", documents.weights))
    )
    for number, each in enumerate(weights or ()):
        wrong = [] if each is None else each[~(np.isfinite(each) & (each >= 0))]
        if len(wrong):
            raise PlanError(f"A weight of micro-batch {number} is {wrong[0]:g}; weights are finite and at least 0.")
    return replace(documents, micro_batches=micro_batches, homes=homes, weights=weights)


def check_room(documents: StepDocuments, ranks: int, tokens_per_rank: int) -> None:
    """Refuse micro-batches of more tokens than data-parallel ranks hold.

    Raises:
        PlanError: naming the first.
    """
    most = ranks * tokens_per_rank
    for number, micro_batch in enumerate(documents.micro_batches):
        tokens = sum(len(document) for document in micro_batch)
        if tokens > most:
            raise PlanError(
                f"Micro-batch {number} has {tokens:,} tokens; {ranks} data-parallel ranks with tokens_per_rank "
                f"{tokens_per_rank:,} hold {most:,}. Put fewer documents into it, or raise tokens_per_rank."
            )


def _by_document(name: str, given: Sequence[Any], micro_batches: Sequence[Sequence[Document]]) -> list[Any]:
    """By micro-batch, an array of one value per document, or None where that is given."""
    if len(given) != len(micro_batches):
        raise PlanError(f"`{name}` are those of {len(given)} micro-batches, and the step has {len(micro_batches)}.")
    arrays = []
    for number, (values, documents) in enumerate(zip(given, micro_batches, strict=True)):
        try:
            array = None if values is None else np.asarray(values)
        except ValueError:  # lists of several lengths
            array = np.empty(0)
        if array is not None and (array.shape != (len(documents),) or array.dtype.kind not in "iuf"):
            raise PlanError(
                f"`{name}` of micro-batch {number} are not one number for each of its {len(documents)} documents."
            )
        arrays.append(array)
    return arrays
