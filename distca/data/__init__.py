"""Documents with their true lengths, packed into micro-batches; tokens are read only where they live."""

from distca.data.batch import RankBatch, rank_batch
from distca.data.corpus import Corpus, DocumentSet
from distca.data.sampler import MicroBatch, Sampler
from distca.data.sources import DocumentSource, open_source
from distca.errors import DataError

__all__ = [
    "Corpus",
    "DataError",
    "DocumentSet",
    "DocumentSource",
    "MicroBatch",
    "RankBatch",
    "Sampler",
    "open_source",
    "rank_batch",
]
