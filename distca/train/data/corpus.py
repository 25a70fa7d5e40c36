"""A run's documents, opened and dealt as its configuration says; reads lengths only and imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from distca.data.batch import Document, targets_of
from distca.data.corpus import Corpus, DocumentSet
from distca.data.sampler import Sampler
from distca.data.sources import open_source
from distca.train.config.schema import RunConfig
from distca.train.data.tokens import is_read_directly, make_tokens, open_tokens, warn_of_tokenizers

if TYPE_CHECKING:
    from megatron_patches.steps.step_documents import StepDocuments


def open_corpus(config: RunConfig, prefixes: Sequence[str | None] | None = None) -> Corpus:
    """Open the run's documents.

    Args:
        config: the run.
        prefixes: by source, its tokens; None tokenizes here what has to be.

    Raises:
        DataError: on missing or empty data, or documents that are too long.
        VersionError: a package that the data needs is missing.
    """
    data = config.data
    if is_read_directly(config):
        source = open_source(
            data.source,
            data.path,
            vocabulary=data.vocabulary,
            seed=data.seed,
            max_length=data.context_length if data.source == "mix" else None,
            field=data.field or "text",
        )
        warn_of_tokenizers(config, [source])
    else:
        source = open_tokens(config, make_tokens(config) if prefixes is None else prefixes)
    return Corpus(source, data.context_length, data.longer, data.validation_fraction, data.seed)


def open_sampler(config: RunConfig, documents: DocumentSet, data_parallel: int) -> Sampler:
    """Deal ``documents`` into the run's global batches.

    Raises:
        DataError: a document does not fit into a micro-batch.
    """
    whole = config.data.whole_documents or (not config.cad.enabled and data_parallel > 1)
    return Sampler(
        documents.lengths,
        data_parallel,
        config.data.tokens_per_rank,
        config.train.micro_batches,
        config.data.seed,
        whole,
    )


def dealt(
    documents: DocumentSet, sampler: Sampler, steps: int, loss: Literal["token", "document"] = "token"
) -> Iterator[StepDocuments]:
    """The documents of the next ``steps`` steps, each with the sampler's state after it as its note; with ``loss``
    document all of a step weigh the same."""
    from megatron_patches.steps.step_documents import StepDocuments

    for _ in range(steps):
        micro_batches = sampler.next()
        chosen = [documents.choose(each.documents) for each in micro_batches]
        weights = document_weights(chosen) if loss == "document" else None
        yield StepDocuments(chosen, [each.rank_of for each in micro_batches], sampler.state_dict(), weights)


def document_weights(micro_batches: Sequence[Sequence[Document]]) -> list[np.ndarray]:
    """Returns, for each micro-batch, [documents] float32 weights of each document's targets.

    With them all documents that have targets count the same. All targets of the step together count as much as without
    weights."""
    targets = [
        np.array([int(targets_of(each, slice(1, len(each))).sum()) for each in documents], np.int64)
        for documents in micro_batches
    ]
    mean = sum(int(each.sum()) for each in targets) / max(sum(int((each > 0).sum()) for each in targets), 1)
    return [(mean / np.maximum(each, 1)).astype(np.float32) for each in targets]
