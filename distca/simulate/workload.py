"""The documents of a simulated step, dealt by the sampler that training uses. Array legend: D documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.baselines.dealing import ranks_of_document
from distca.data.sampler import MicroBatch, Sampler
from distca.errors import SimulationError


@dataclass(frozen=True)
class Workload:
    """The micro-batches of one global batch.

    Attributes:
        micro_batches: their documents; ``rank_of`` is the bin that the sampler packed a document into.
        bins: equal shares of the data-parallel ranks, each the fewest ranks that hold the longest document.
        whole: whether documents stay whole on these ranks with DistCA too; otherwise they may span ranks there.
    """

    micro_batches: tuple[MicroBatch, ...]
    bins: int
    whole: bool = False

    @property
    def tokens(self) -> int:
        """The tokens of all documents."""
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
        """A global batch of documents of these ``lengths`` [D], in the order that training with ``seed`` has them.

        Args:
            lengths: tokens per document.
            context: most tokens of a document.
            ranks: data-parallel ranks.
            tokens_per_rank: rows of a rank per micro-batch.
            micro_batches: of the global batch.
            seed: of the order.
            skip: global batches before it.

        Raises:
            SimulationError: a document is longer than the context, or the context than all ranks hold.
        """
        longest = int(lengths.max(initial=0))
        if longest > context:
            raise SimulationError(
                f"A document has {longest:,} tokens, but the context is {context:,}; raise `context` or cut it."
            )
        wide = ranks_of_document(context, ranks, tokens_per_rank)
        if wide is None:
            raise SimulationError(
                f"A document of {context:,} tokens does not fit into {ranks} data-parallel ranks of "
                f"{tokens_per_rank:,} tokens; lower `context` or raise `tokens_per_rank`."
            )
        sampler = Sampler(lengths, ranks // wide, wide * tokens_per_rank, micro_batches, seed, whole=True)
        for _ in range(skip):
            sampler.next()
        return Workload(sampler.next(), ranks // wide)
