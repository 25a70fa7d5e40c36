"""Draws the documents of a simulated step, with the sampler that training uses. Array legend: D documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.baselines.dealing import ranks_of_document
from distca.data.sampler import MicroBatch, Sampler
from distca.errors import SimulationError
from distca.words import count


@dataclass(frozen=True)
class Workload:
    """The micro-batches of one global batch.

    Attributes:
        micro_batches: the documents of each micro-batch; ``rank_of`` is the bin of each document.
        bins: the number of bins. A bin is a group of data-parallel ranks, of the fewest ranks that can hold the longest
            document. The sampler packs whole documents into bins.
        whole: True keeps every document on its rank with DistCA too. False lets DistCA cut documents over ranks.
    """

    micro_batches: tuple[MicroBatch, ...]
    bins: int
    whole: bool = False

    @property
    def tokens(self) -> int:
        """The number of tokens of all documents."""
        return sum(each.tokens for each in self.micro_batches)

    @staticmethod
    def draw(
        lengths: np.ndarray,
        context: int,
        ranks: int,
        tokens_per_rank: int,
        micro_batches: int,
        seed: int,
        skip: int = 0,
    ) -> Workload:
        """Returns a global batch of the documents that training with this seed has in it.

        Args:
            lengths: [D] tokens per document.
            context: most tokens of a document.
            ranks: number of data-parallel ranks.
            tokens_per_rank: most rows of a micro-batch on a rank.
            micro_batches: number of micro-batches in a global batch.
            seed: seed of the documents' order.
            skip: number of global batches before this one.

        Raises:
            SimulationError: a document is longer than ``context``, or all ranks together cannot hold ``context``
                tokens.
        """
        longest = int(lengths.max(initial=0))
        if longest > context:
            raise SimulationError(
                f"A document has {longest:,} tokens, but the context is {context:,}; raise `context` or cut it."
            )
        wide = ranks_of_document(context, ranks, tokens_per_rank)
        if wide is None:
            raise SimulationError(
                f"A document of {context:,} tokens does not fit into {count(ranks, 'data-parallel rank')} of "
                f"{tokens_per_rank:,} tokens; lower `context` or raise `tokens_per_rank`."
            )
        sampler = Sampler(lengths, ranks // wide, wide * tokens_per_rank, micro_batches, seed, whole=True)
        for _ in range(skip):
            sampler.next()
        return Workload(sampler.next(), ranks // wide)
