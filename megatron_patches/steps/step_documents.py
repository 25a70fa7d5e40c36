"""The documents of a step as a caller gives them, and checks that they are documents."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distca.data.batch import Document
from distca.errors import PlanError

_SAMPLES, _SAMPLE_IDS = 8, 16
"""Documents of a step that ranks compare, and token ids of each. More would find rarer differences, but each document
of another rank is read for it alone."""


@dataclass(frozen=True)
class StepDocuments:
    """The documents of one step, the same on every rank.

    Attributes:
        micro_batches: by micro-batch, its documents; a document is anything with a length and slices of token ids.
        homes: by micro-batch, [documents] the data-parallel rank on which each stays whole; None lets documents span
            ranks.
        note: anything that the caller wants to find again at the step.
        weights: by micro-batch, [documents] weight of each target of a document in the loss; None weighs all by 1.
    """

    micro_batches: Sequence[Sequence[Document]]
    homes: Sequence[np.ndarray | None] | None = None
    note: Any = None
    weights: Sequence[np.ndarray | None] | None = None


def listed(given: StepDocuments | Sequence[Sequence[Document]]) -> StepDocuments:
    """Returns the same documents as lists, which can be read several times.

    Raises:
        PlanError: something is no micro-batch or no document; there is not one home or weight for each document; a
            weight is negative or no number.
    """
    documents = given if isinstance(given, StepDocuments) else StepDocuments(given)
    try:
        micro_batches = [list(each) for each in documents.micro_batches]
    except TypeError as error:
        raise PlanError(f"A step is a list of micro-batches, and each a list of documents ({error}).") from None
    for number, micro_batch in enumerate(micro_batches):
        for place, document in enumerate(micro_batch):
            _check_row(f"Document {place} of micro-batch {number}", document)
    homes, weights = (
        None if values is None else _by_document(name, kinds, values, micro_batches)
        for name, kinds, values in (("homes", "iu", documents.homes), ("weights", "biuf", documents.weights))
    )
    if weights is not None:
        weights = [np.ones(len(of)) if each is None else each for of, each in zip(micro_batches, weights, strict=True)]
    for number, each in enumerate(weights or ()):
        wrong = each[~(np.isfinite(each) & (each >= 0))]
        if len(wrong):
            raise PlanError(f"A weight of micro-batch {number} is {wrong[0]:g}; weights are finite and at least 0.")
    return replace(documents, micro_batches=micro_batches, homes=homes, weights=weights)


def check_room(documents: StepDocuments, ranks: int, tokens_per_rank: int) -> None:
    """Refuses documents that have no place.

    These are documents without tokens, micro-batches of more tokens than data-parallel ranks hold, and homes of more
    tokens than one of them holds. A home that is no data-parallel rank is refused, too.

    Raises:
        PlanError: a document has no place; it names the first.
    """
    most = ranks * tokens_per_rank
    for number, micro_batch in enumerate(documents.micro_batches):
        lengths = [len(document) for document in micro_batch]
        if 0 in lengths:
            raise PlanError(
                f"Document {lengths.index(0)} of micro-batch {number} has 0 tokens; it needs at least 1: leave it out."
            )
        tokens = sum(lengths)
        if tokens > most:
            raise PlanError(
                f"Micro-batch {number} has {tokens:,} tokens; {ranks} data-parallel ranks with tokens_per_rank "
                f"{tokens_per_rank:,} hold {most:,}. Put fewer documents into it, or raise tokens_per_rank."
            )
        homes = documents.homes[number] if documents.homes else None
        if homes is None:
            continue
        outside = homes[(homes < 0) | (homes >= ranks)]
        if len(outside):
            raise PlanError(
                f"Homes of micro-batch {number} name data-parallel rank {outside[0]}; they are 0 to {ranks - 1}."
            )
        by_rank = np.bincount(homes, lengths, ranks)
        if by_rank.max() > tokens_per_rank:
            raise PlanError(
                f"Homes of micro-batch {number} put {by_rank.max():,.0f} tokens on data-parallel rank "
                f"{by_rank.argmax()}, and tokens_per_rank is {tokens_per_rank:,}. Spread them, or raise it."
            )


def _check_row(name: str, document: Any) -> None:
    if not hasattr(document, "__len__") or isinstance(document, Mapping | str | bytes):
        found = f"a {type(document).__name__}"
    elif getattr(document, "ndim", 1) != 1:
        found = f"an array of {document.ndim} dimensions"
    else:
        return
    raise PlanError(
        f"{name} is {found}; a step is a list of micro-batches, each a list of documents, each a row of token ids."
    )


def checksum(documents: StepDocuments) -> int:
    """Returns a CRC-32 of all weights and of some token ids of some documents.

    Ranks that read other documents, of lengths that happen to be the same, rarely have the same number. Reading all
    tokens would mean reading every rank's rows on every rank.

    Args:
        documents: from :func:`listed`.
    """
    value = 0
    for weights in documents.weights or ():
        value = zlib.crc32(np.asarray(weights, np.float64).tobytes(), value)
    everyone = [document for micro_batch in documents.micro_batches for document in micro_batch]
    for number in np.linspace(0, len(everyone) - 1, _SAMPLES).astype(int).tolist() if everyone else ():
        document = everyone[number]
        first = max(0, (len(document) - _SAMPLE_IDS) // 2)
        ids = np.asarray(document[first : min(first + _SAMPLE_IDS, len(document))])
        if ids.dtype.kind in "iu":  # the rank that has the rows refuses other types
            value = zlib.crc32(ids.astype(np.int64).tobytes(), value)
    return value


def _by_document(name: str, kinds: str, given: Sequence[Any], micro_batches: Sequence[Sequence[Document]]) -> list[Any]:
    """Returns, for each micro-batch, an array of one value per document, or None where that is given."""
    if len(given) != len(micro_batches):
        raise PlanError(f"`{name}` are those of {len(given)} micro-batches, and the step has {len(micro_batches)}.")
    arrays = []
    for number, (values, documents) in enumerate(zip(given, micro_batches, strict=True)):
        try:
            array = None if values is None else np.asarray(values)
        except ValueError:  # lists of several lengths
            array = np.empty(0)
        if array is not None and not array.size:
            array = array.astype(np.int64)
        if array is not None and (array.shape != (len(documents),) or array.dtype.kind not in kinds):
            each = "rank" if name == "homes" else "number"
            raise PlanError(
                f"`{name}` of micro-batch {number} are not one {each} for each of its {len(documents)} documents."
            )
        arrays.append(array)
    return arrays
