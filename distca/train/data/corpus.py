"""A run's documents, opened and dealt as its configuration says; reads lengths only and imports no torch."""

from __future__ import annotations

from distca.data.corpus import Corpus, DocumentSet
from distca.data.sampler import Sampler
from distca.data.sources import open_source
from distca.train.config.schema import RunConfig


def open_corpus(config: RunConfig) -> Corpus:
    """Open the run's documents.

    Raises:
        DataError: on missing or empty data, or documents that are too long.
    """
    data = config.data
    source = open_source(
        data.source,
        data.path,
        data.tokenizer,
        vocabulary=data.vocabulary,
        seed=data.seed,
        max_length=data.context_length if data.source == "mix" else None,
    )
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
