"""How steps are planned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from distca.errors import PlanError
from distca.plan.choice import Scheduler
from distca.plan.cost.linear import NonAttention
from distca.plan.cost.model import CostModel
from distca.plan.cost.pool import PoolCost
from distca.plan.kinds import AttentionKind
from distca.plan.network import Links


@dataclass(frozen=True)
class PlanOptions:
    """How steps are planned; the same on every rank.

    Attributes:
        ranks: data-parallel ranks of a stage, the homes of its rows.
        servers: servers without a model, which have no rows of their own; in the pool they follow the homes.
        cost: seconds per CA-task.
        stages: pipeline stages.
        nano_batches: 1, or 2 for ping and pong.
        align: rows of a nano-batch on a rank are a multiple of this, which is a multiple of ``shares``.
        shares: tensor-parallel ranks that share the rows; 1 without sequence parallelism.
        resend: whether backward has servers of its own, to which rows are sent again; with several stages it has.
        disaggregate: False computes every document at home.
        tolerance: how far above the mean the busiest server may be; None takes the one for the size of the pool.
        links: which servers share a node.
        kinds: the kinds of the model's attention layers; layouts level the work of the first.
        costs: seconds per CA-task by kind; none where ``cost`` is that of all kinds.
        layer_kinds: by stage and layer, the index of the layer's kind; empty where all layers have the first.
        non_attention: levels a phase's linear layers and attention together; None levels attention alone.
        server_gb_s: GB/s of a server without a model over the network; 0 takes the rate of ``links``.
        scheduler: plans one nano-batch, in place of the product's scheduler (for tests).

    Raises:
        PlanError: a size is below 1; attention stays at home, but there are servers without a model, or their rate is
            negative; there is not one table or factor for each server or home; several stages keep rows for backward;
            stages have unequal layers; costs are for another number of kinds; a layer's kind is unknown.
    """

    ranks: int
    cost: CostModel
    stages: int = 1
    nano_batches: int = 1
    align: int = 1
    shares: int = 1
    resend: bool = False
    disaggregate: bool = True
    tolerance: float | None = None
    links: Links = field(default_factory=Links)
    kinds: tuple[AttentionKind, ...] = (AttentionKind(1.0),)
    costs: tuple[CostModel, ...] = ()
    layer_kinds: tuple[tuple[int, ...], ...] = ()
    non_attention: NonAttention | None = None
    scheduler: Scheduler | None = None
    servers: int = 0
    server_gb_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.ranks, self.stages) < 1:
            raise PlanError(f"A plan needs at least one rank and one stage, not {self.ranks} and {self.stages}.")
        if self.stages > 1 and self.disaggregate and not self.resend:
            raise PlanError(
                f"backward is keep, but with {self.stages} pipeline stages the server of a forward is busy with other "
                "phases by its backward; set it to auto or resend."
            )
        self._check_servers()
        layers = [len(each) for each in self.layer_kinds]
        if layers and (len(layers) != self.stages or min(layers) != max(layers) or not min(layers)):
            raise PlanError(f"{self.stages} stages need equally many layers each, not {layers}.")
        if self.costs and len(self.costs) != len(self.kinds):
            raise PlanError(
                f"{len(self.kinds)} kinds of layers need as many costs, or none; {len(self.costs)} are given."
            )
        if {kind for stage in self.layer_kinds for kind in stage} - set(range(len(self.kinds))) or not self.kinds:
            raise PlanError(
                f"layer_kinds is {self.layer_kinds}, and kinds are numbered from 0 to {len(self.kinds) - 1}."
            )

    def _check_servers(self) -> None:
        if self.servers < 0 or (self.servers and not self.disaggregate):
            raise PlanError(f"`servers` is {self.servers}; it must be 0 or more, and 0 where attention stays at home.")
        if not 0 <= self.server_gb_s < math.inf:
            raise PlanError(f"`server_gb_s` is {self.server_gb_s}; it must be 0 or more.")
        for cost in (self.cost, *self.costs):
            if isinstance(cost, PoolCost) and len(cost.of_server) != self.pool_ranks:
                raise PlanError(f"{len(cost.of_server)} servers have a cost table, and there are {self.pool_ranks}.")
        factors = () if self.non_attention is None else self.non_attention.factors
        if len(factors) not in (0, self.homes):
            raise PlanError(f"{len(factors)} homes have a factor, and there are {self.homes}.")

    @cached_property
    def server_cost(self) -> CostModel:
        """Seconds per CA-task by server, in layers of the first kind."""
        if isinstance(self.cost, PoolCost) or not self.servers:
            return self.cost
        return PoolCost((self.cost,), (0,) * self.pool_ranks)

    @cached_property
    def combinations(self) -> tuple[tuple[int, ...], ...]:
        """The combinations of kinds that stages run at the same time, each once: by stage, the number of its kind."""
        return tuple(dict.fromkeys(zip(*self.layer_kinds, strict=True))) or ((0,) * self.stages,)

    @cached_property
    def layer_combinations(self) -> tuple[int, ...]:
        """The number of the combination of each layer of a stage; one layer where nothing is known of layers."""
        each = {combination: number for number, combination in enumerate(self.combinations)}
        return tuple(each[layer] for layer in zip(*self.layer_kinds, strict=True)) or (0,)

    @property
    def shares_of_layers(self) -> np.ndarray:
        """[C] the part of a stage's layers that has each combination."""
        layers = np.array(self.layer_combinations)
        return np.asarray(np.bincount(layers, minlength=len(self.combinations)) / len(layers))

    @property
    def names_of_combinations(self) -> tuple[str, ...]:
        """The name of each combination in tables: how many layers have it, and the kind of every stage."""
        layers = self.layer_combinations
        return tuple(
            f"{layers.count(number)} of {len(layers)} layers: {' | '.join(self.kinds[kind].name for kind in kinds)}"
            for number, kinds in enumerate(self.combinations)
        )

    @property
    def cost_of_kind(self) -> tuple[CostModel, ...]:
        """Seconds per CA-task by kind."""
        return self.costs or (self.cost,) * len(self.kinds)

    @property
    def windows(self) -> tuple[int, ...]:
        """The keys that a query sees, by kind; 0 for all."""
        return tuple(kind.window for kind in self.kinds)

    @property
    def sinks(self) -> bool:
        """Whether layers have sinks; these are in all layers or in none."""
        return any(kind.sink for kind in self.kinds)

    @property
    def homes(self) -> int:
        """The number of ranks of the pool with a model, which come first."""
        return self.stages * self.ranks

    @property
    def pool_ranks(self) -> int:
        """The number of servers of the pool, homes among them."""
        return self.homes + self.servers

    @property
    def network_bytes_per_s(self) -> np.ndarray:
        """[R] bytes per second of every server of the pool over the network."""
        found = np.full(self.pool_ranks, self.links.bytes_per_s(far=True))
        if self.server_gb_s:
            found[self.homes :] = self.server_gb_s * 1e9
        return found

    @property
    def keeps(self) -> bool:
        """Whether servers keep the rows of a forward, and compute its backward."""
        return self.stages == 1 and not self.resend

    @property
    def stage_node(self) -> int:
        """How many consecutive ranks of a stage share a node; 0 where all share one, none do, or stages share nodes
        unevenly."""
        size = self.links.ranks_per_node
        return size if size > 1 and self.ranks % size == 0 else 0

    def pool_rank(self, stage: int, rank: int) -> int:
        """The number that a stage's data-parallel rank has in the pool."""
        return stage * self.ranks + rank
