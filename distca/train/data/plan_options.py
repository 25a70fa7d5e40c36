"""How micro-batches are planned."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from distca.plan import Links
from distca.plan.cost.model import CostModel
from distca.plan.pipeline import StageLayers
from distca.train.run.linear_cost import BesideAttention


@dataclass(frozen=True)
class Planning:
    """How micro-batches are planned; the same on every rank.

    Attributes:
        rank: this data-parallel rank, the home of its rows.
        ranks: data-parallel ranks.
        stage: this pipeline stage.
        stages: pipeline stages; the server pool is all of their data-parallel ranks, numbered stage by stage.
        layers: of the stages.
        cost: seconds per CA-task.
        disaggregate: False computes every document at home.
        nano_batches: 1, or 2 for ping and pong.
        resend: whether backward has servers of its own.
        tolerance: how far above the mean the busiest server may be.
        chunks: tensor-parallel ranks that share a micro-batch's rows (sequence parallelism).
        device: where tensors go.
        links: which servers share a machine.
        beside: with pipeline stages, what busy ranks compute beside attention; None to level attention alone.
    """

    rank: int
    ranks: int
    stage: int
    stages: int
    layers: StageLayers
    cost: CostModel
    disaggregate: bool
    nano_batches: int
    resend: bool
    tolerance: float
    chunks: int
    device: torch.device
    links: Links = field(default_factory=Links)
    beside: BesideAttention | None = None

    @property
    def pool_rank(self) -> int:
        """This rank in the server pool."""
        return self.stage * self.ranks + self.rank

    @property
    def pool_ranks(self) -> int:
        """Size of the server pool."""
        return self.stages * self.ranks
