"""Holds and checks the documents of one training step, for ``CAD.plan_step`` and ``CAD.plan_ahead``.

A step is a list of micro-batches. A micro-batch is a list of the documents of all data-parallel ranks. A document's
*home* is the data-parallel rank that the caller chose to hold the whole document.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distca.data.batch import Document
from distca.errors import PlanError

_SAMPLES, _SAMPLE_IDS = 8, 16
""":func:`checksum` reads up to 16 token ids of up to 8 documents of a step. Every rank reads these ids from the data,
so larger numbers make every step slower."""


@dataclass(frozen=True)
class StepDocuments:
    """The documents of one step, the same on every rank.

    Attributes:
        micro_batches: for each micro-batch a list of documents. A document is anything with a length and slices of
            token ids.
        homes: for each micro-batch a [documents] integer array, the home of each document. With None the planner may
            cut documents over ranks.
        note: any object; the planned step has it as ``step.documents.note``.
        weights: for each micro-batch a [documents] array: what each token of a document weighs in the loss, at least 0
            and finite in float32. None is 1 for all documents.
    """

    micro_batches: Sequence[Sequence[Document]]
    homes: Sequence[np.ndarray | None] | None = None
    note: Any = None
    weights: Sequence[np.ndarray | None] | None = None


def listed(given: StepDocuments | Sequence[Sequence[Document]]) -> StepDocuments:
    """Returns the given documents with micro-batches as lists, and homes and weights as arrays.

    Raises:
        PlanError: micro-batches, documents, homes or weights are not as :class:`StepDocuments` says.
    """
    documents = given if isinstance(given, StepDocuments) else StepDocuments(given)
    try:
        micro_batches = [list(each) for each in documents.micro_batches]
    except TypeError as error:
        raise PlanError(f"A step is a list of micro-batches, and each a list of documents ({error}).") from None
    for number, micro_batch in enumerate(micro_batches):
        for place, document in enumerate(micro_batch):
            _check_document(f"Document {place} of micro-batch {number}", document)
    homes, weights = (
        None if values is None else _by_document(name, kinds, values, micro_batches)
        for name, kinds, values in (("homes", "iu", documents.homes), ("weights", "biuf", documents.weights))
    )
    if weights is not None:
        weights = [np.ones(len(of)) if each is None else each for of, each in zip(micro_batches, weights, strict=True)]
    for number, each in enumerate(weights or ()):
        wrong = each[~((each >= 0) & (each <= np.finfo(np.float32).max))]
        if len(wrong):
            raise PlanError(f"A weight of micro-batch {number} is {wrong[0]:g}; float32 weights from 0 on are allowed.")
    return replace(documents, micro_batches=micro_batches, homes=homes, weights=weights)


def check_room(documents: StepDocuments, ranks: int, tokens_per_rank: int) -> None:
    """Refuses documents that do not fit.

    Args:
        documents: from :func:`listed`.
        tokens_per_rank: a micro-batch has at most ``ranks`` times this many tokens. If it has homes, each rank is the
            home of at most this many.

    Raises:
        PlanError: a document has no tokens; a micro-batch or a rank has too many tokens; or a home is no rank.
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
                f"{tokens_per_rank:,} hold {most:,}. Put fewer documents into the micro-batch, or raise "
                "tokens_per_rank."
            )
        homes = documents.homes[number] if documents.homes else None
        if homes is None:
            continue
        outside = homes[(homes < 0) | (homes >= ranks)]
        if len(outside):
            raise PlanError(
                f"Homes of micro-batch {number} name data-parallel rank {outside[0]}; ranks are 0 to {ranks - 1}."
            )
        by_rank = np.bincount(homes, lengths, ranks)
        if by_rank.max() > tokens_per_rank:
            raise PlanError(
                f"Homes of micro-batch {number} put {by_rank.max():,.0f} tokens on data-parallel rank "
                f"{by_rank.argmax()}, and tokens_per_rank is {tokens_per_rank:,}: spread the homes, or raise "
                "tokens_per_rank."
            )


def _check_document(name: str, document: Any) -> None:
    indexed = hasattr(document, "__len__") and hasattr(document, "__getitem__")
    if not indexed or isinstance(document, Mapping | str | bytes):
        found = f"a {type(document).__name__}"
    elif getattr(document, "ndim", 1) != 1:
        found = f"an array of {document.ndim} dimensions"
    else:
        return
    raise PlanError(
        f"{name} is {found}; a step is a list of micro-batches, each a list of documents, each a row of token ids."
    )


def checksum(documents: StepDocuments) -> int:
    """Returns a CRC-32 of all weights, and of the middle token ids of up to 8 documents. Ranks compare these numbers.

    ``documents`` are from :func:`listed`.
    """
    value = 0
    for weights in documents.weights or ():
        value = zlib.crc32(np.asarray(weights, np.float64).tobytes(), value)
    everyone = [document for micro_batch in documents.micro_batches for document in micro_batch]
    for number in np.linspace(0, len(everyone) - 1, _SAMPLES).astype(int).tolist() if everyone else ():
        document = everyone[number]
        first = max(0, (len(document) - _SAMPLE_IDS) // 2)
        ids = np.asarray(document[first : min(first + _SAMPLE_IDS, len(document))])
        if ids.dtype.kind in "iu":  # other types are refused by the ranks that hold these tokens
            value = zlib.crc32(ids.astype(np.int64).tobytes(), value)
    return value


def _by_document(name: str, kinds: str, given: Any, micro_batches: Sequence[Sequence[Document]]) -> list[Any]:
    """Returns homes or weights as an array for each micro-batch, or None where the caller gave None.

    ``kinds`` are the allowed values of ``numpy.dtype.kind``.
    """
    given = list(given) if isinstance(given, Iterable) else [given]
    if len(given) != len(micro_batches):
        raise PlanError(f"`{name}` are for {len(given)} micro-batches, and the step has {len(micro_batches)}.")
    arrays = []
    for number, (values, documents) in enumerate(zip(given, micro_batches, strict=True)):
        try:
            array = None if values is None else np.asarray(values)
        except ValueError:  # the values are lists of unequal lengths
            array = np.empty(0)
        except (TypeError, RuntimeError) as error:  # a tensor on a GPU, or one that requires a gradient
            raise PlanError(f"`{name}` of micro-batch {number} cannot be read as an array: {error}") from None
        if array is not None and not array.size:
            array = array.astype(np.int64)  # numpy makes a float array of an empty list
        if array is not None and (array.shape != (len(documents),) or array.dtype.kind not in kinds):
            each = "rank" if name == "homes" else "number"
            raise PlanError(
                f"`{name}` of micro-batch {number} are not one {each} for each of its {len(documents)} documents."
            )
        arrays.append(array)
    return arrays
