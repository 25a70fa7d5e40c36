"""Layouts of ranks in which training is compared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """A layout of ranks.

    Attributes:
        ranks: all of them.
        tp: tensor-parallel ranks, with sequence parallelism.
        pp: pipeline stages.
        ep: expert-parallel ranks, within a stage.
        ranks_per_node: consecutive servers that count as a node; 0 for those of one machine.
    """

    ranks: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    ranks_per_node: int = 0

    @property
    def data_parallel(self) -> int:
        """Ranks that have documents of their own."""
        return self.ranks // (self.tp * self.pp)


USUAL = (World(1), World(2), World(2, tp=2), World(4), World(4, tp=2))
OF_KINDS = (
    World(1),
    World(2),
    World(3),
    World(4, ranks_per_node=2),
    World(2, tp=2),
    World(4, tp=2),
    World(2, pp=2),
    World(4, pp=2),
    World(4, pp=4),
    World(4, tp=2, pp=2),
    World(8, tp=2, pp=2),
    World(8, pp=2, ranks_per_node=4),
)
"""The worlds of the matrix of kinds of layers."""
OF_EXPERTS = (
    World(1),
    World(2, ep=2),
    World(2, tp=2),
    World(4, ep=2),
    World(4, ep=4),
    World(4, tp=2, ep=2),
    World(4, pp=2, ep=2),
    World(8, tp=2, pp=2, ep=2),
)
"""The worlds of models with experts."""
