"""The global batches that all modes of a workload train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.throughput.settings import Cell
from distca.baselines import Mode, Work, groups_of
from distca.data.corpus import Corpus, DocumentSet
from distca.data.mixes import sample_long_context
from distca.data.sampler import MicroBatch, Sampler
from distca.data.sources.mix import RandomTokens


@dataclass(frozen=True)
class Batches:
    """Documents and how they are dealt.

    Attributes:
        documents: tokens are pure functions of document and position, so that every layout reads the same ones.
        global_batches: micro-batches of each; ``rank_of`` is the bin that the sampler packed a document into.
        bins: equal shares of the data-parallel ranks, each the fewest ranks that hold the longest document.
    """

    documents: DocumentSet
    global_batches: tuple[tuple[MicroBatch, ...], ...]
    bins: int


def draw_batches(
    cell: Cell, count: int, *, ranks: int, tokens_per_rank: int, micro_batches: int, vocabulary: int, seed: int
) -> Batches:
    """Draw ``count`` global batches; the same arguments give the same batches on every rank. Another count gives
    others: the documents are drawn anew for as many tokens.

    Raises:
        ConfigError: the longest document does not fit into all ranks together.
    """
    wide = cell.ranks_per_document(ranks, tokens_per_rank)
    bins = ranks // wide
    tokens = max(count, 8) * micro_batches * ranks * tokens_per_rank
    lengths = sample_long_context(cell.mix, tokens, cell.context, seed, full_share=cell.full_share)
    documents = Corpus(RandomTokens(lengths, vocabulary, seed), cell.context).train
    sampler = Sampler(documents.lengths, bins, wide * tokens_per_rank, micro_batches, seed, whole=True)
    return Batches(documents, tuple(sampler.next() for _ in range(count)), bins)


class Replay:
    """Deals recorded global batches again, as a sampler does; after the last one it begins anew.

    Args:
        batches: what is dealt.
        first: where it begins.
        bins: whether micro-batches keep the sampler's bins; without them documents may span ranks.
    """

    def __init__(self, batches: Sequence[tuple[MicroBatch, ...]], first: int, bins: bool) -> None:
        self._batches, self._next, self._bins = batches, first, bins

    def next(self) -> tuple[MicroBatch, ...]:
        """The next global batch."""
        batch = self._batches[self._next % len(self._batches)]
        self._next += 1
        return batch if self._bins else tuple(replace(micro_batch, rank_of=None) for micro_batch in batch)

    def state_dict(self) -> dict[str, Any]:
        """Nothing that a checkpoint would need."""
        return {}


def lengths_of(batch: tuple[MicroBatch, ...]) -> np.ndarray:
    """Tokens of every document of a global batch."""
    return np.concatenate([micro_batch.lengths for micro_batch in batch])


def check_fits(mode: Mode, batches: Batches, ranks: int, room: int, work: Work) -> None:
    """Refuse a mode that one of the batches does not fit.

    Raises:
        BaselineError: in a sentence.
    """
    for batch in batches.global_batches:
        for micro_batch in batch:
            assert micro_batch.rank_of is not None
            if not mode.disaggregated:
                groups_of(mode, micro_batch.lengths, micro_batch.rank_of, batches.bins, ranks, room, work)
