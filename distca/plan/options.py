"""The options of planning, with their checks.

- A *row* is one token's q, or its k and v. The *home* of a row is the rank that computes the token's linear layers.
- A *server* is a rank that computes attention: every home, and ranks without a model if there are any.
- A *task* is a range of query rows of one document on one server.

``step.py`` plans with these options. Equal options and document lengths give equal plans on all ranks.
"""

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
    """The options of planning.

    Attention layers with and without a window, for example, are two *kinds* of layers. All pipeline stages run their
    layer i at the same time. The kinds of these layers, one for each stage, are a *combination*.
    Array legend: R servers, C combinations.

    Attributes:
        ranks: number of data-parallel ranks of a stage.
        servers: number of servers without a model; they are numbered after all other ranks.
        cost: the model of tasks' seconds.
        stages: number of pipeline stages.
        nano_batches: number of parts, the nano-batches, in which a micro-batch is computed: 1 or 2. With 2, transfers
            of one part run during the computation of the other.
        align: the number of rows of a nano-batch on a rank is a multiple of this. On the last rank, or if documents
            have given homes, ``distca/data/batch.py`` pads rows to a multiple. ``align`` must be a multiple of
            ``shares``.
        shares: number of tensor-parallel ranks that split a data-parallel rank's rows; 1 without sequence parallelism.
        resend: True if homes send q, k and v again for backward; False if servers keep q, k and v from forward. With
            several stages and ``disaggregate``, ``resend`` must be True.
        disaggregate: False computes the attention of every row at its home.
        tolerance: the scheduler ends when the slowest server's time is at most this fraction above the mean, or when no
            move helps. None takes a value that depends on the number of servers.
        links: which servers share a node, and how long bytes take inside a node and between nodes.
        kinds: the kinds of the model's attention layers.
        costs: a cost model for each kind; empty if all kinds have ``cost``.
        layer_kinds: for each stage and layer with attention, the index of the layer's kind; empty if all such layers
            have the first kind.
        non_attention: seconds of linear layers, to balance together with attention; None balances attention alone.
        scheduler: plans one nano-batch, for tests; None takes the default scheduler.
        server_gb_s: network rate of each server without a model, in GB/s; empty takes the rate of ``links``.
        recurrent: whether the model has recurrent layers (linear attention, SSM).

    Raises:
        PlanError: an option does not fit another option, or is out of its range; the message says which. Planning
            itself checks ``nano_batches`` and ``tolerance``.
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
    server_gb_s: tuple[float, ...] = ()
    recurrent: bool = False

    def __post_init__(self) -> None:
        if min(self.ranks, self.stages) < 1:
            raise PlanError(f"A plan needs at least one rank and one stage, not {self.ranks} and {self.stages}.")
        if self.stages > 1 and self.disaggregate and not self.resend:
            raise PlanError(
                f"backward is keep, but with {self.stages} pipeline stages a server has other work in backward than in "
                "forward; set backward to auto or resend."
            )
        if min(self.align, self.shares) < 1 or self.align % self.shares:
            raise PlanError(
                f"align is {self.align} and shares is {self.shares}; set both to 1 or more, and align to a multiple of "
                "shares: the tensor-parallel ranks of a data-parallel rank get equally many rows."
            )
        self._check_servers()
        layers = [len(each) for each in self.layer_kinds]
        if layers and (len(layers) != self.stages or min(layers) != max(layers) or not min(layers)):
            raise PlanError(f"{self.stages} stages need equally many layers each, not {layers}.")
        if self.costs and len(self.costs) != len(self.kinds):
            raise PlanError(
                f"{len(self.kinds)} kinds of layers need as many cost models, or none; {len(self.costs)} are given."
            )
        if not self.kinds:
            raise PlanError("kinds is empty; give the kind of at least one attention layer.")
        if {kind for stage in self.layer_kinds for kind in stage} - set(range(len(self.kinds))):
            raise PlanError(
                f"layer_kinds is {self.layer_kinds}, and kinds are numbered from 0 to {len(self.kinds) - 1}."
            )

    def _check_servers(self) -> None:
        if self.servers < 0 or (self.servers and not self.disaggregate):
            raise PlanError(
                f"`servers` is {self.servers}; it must be 0 or more, and 0 where attention stays at home "
                f"(`disaggregate` is {self.disaggregate})."
            )
        if len(self.server_gb_s) not in (0, self.servers) or not all(0 < each < math.inf for each in self.server_gb_s):
            raise PlanError(
                f"`server_gb_s` is {self.server_gb_s}; give a finite number above 0 for each of the {self.servers} "
                "servers without a model, or leave it empty."
            )
        for cost in (self.cost, *self.costs):
            if isinstance(cost, PoolCost) and len(cost.of_server) != self.pool_ranks:
                raise PlanError(
                    f"{len(cost.of_server)} servers have a cost table, and there are {self.pool_ranks} servers."
                )
        factors = () if self.non_attention is None else self.non_attention.factors
        if len(factors) not in (0, self.homes):
            raise PlanError(f"`non_attention` has factors for {len(factors)} homes, and there are {self.homes} homes.")

    @cached_property
    def server_cost(self) -> CostModel:
        return self.on_servers(self.cost)

    def on_servers(self, cost: CostModel) -> CostModel:
        """Returns ``cost`` as the cost model of all servers.

        A :class:`PoolCost` has a table for each server, and is returned as it is. Any other model holds for all
        servers. If some servers have no model, ``cost`` is returned inside a PoolCost, for which ``unlike.py`` plans:
        servers are then unlike, because only homes have other work beside attention."""
        if isinstance(cost, PoolCost) or not self.servers:
            return cost
        return PoolCost((cost,), (0,) * self.pool_ranks)

    @cached_property
    def combinations(self) -> tuple[tuple[int, ...], ...]:
        """Returns each combination once, as the index of a kind for each stage."""
        return tuple(dict.fromkeys(zip(*self.layer_kinds, strict=True))) or ((0,) * self.stages,)

    @cached_property
    def layer_combinations(self) -> tuple[int, ...]:
        """Returns the index of each layer's combination, or (0,) if ``layer_kinds`` is empty."""
        each = {combination: number for number, combination in enumerate(self.combinations)}
        return tuple(each[layer] for layer in zip(*self.layer_kinds, strict=True)) or (0,)

    @property
    def shares_of_layers(self) -> np.ndarray:
        """Returns [C] the fraction of a stage's layers with attention that have each combination."""
        layers = np.array(self.layer_combinations)
        return np.asarray(np.bincount(layers, minlength=len(self.combinations)) / len(layers))

    @property
    def names_of_combinations(self) -> tuple[str, ...]:
        """Returns the name of each combination, such as "3 of 4 layers: window 512 | full" for two stages."""
        layers = self.layer_combinations
        return tuple(
            f"{layers.count(number)} of {len(layers)} layers: {' | '.join(self.kinds[kind].name for kind in kinds)}"
            for number, kinds in enumerate(self.combinations)
        )

    @property
    def cost_of_kind(self) -> tuple[CostModel, ...]:
        return self.costs or (self.cost,) * len(self.kinds)

    @property
    def windows(self) -> tuple[int, ...]:
        """Returns, for each kind, the number of keys that a query sees; 0 for all keys."""
        return tuple(kind.window for kind in self.kinds)

    @property
    def sinks(self) -> bool:
        """Returns whether heads have sinks, learned scores in the softmax, in any layer."""
        return any(kind.sink for kind in self.kinds)

    @property
    def homes(self) -> int:
        """Returns the number of ranks with layers of the model, in all stages together."""
        return self.stages * self.ranks

    @property
    def pool_ranks(self) -> int:
        """Returns the number of servers, R."""
        return self.homes + self.servers

    @property
    def network_bytes_per_s(self) -> np.ndarray:
        """Returns [R] the network rate of every server, in bytes per second."""
        found = np.full(self.pool_ranks, self.links.bytes_per_s(far=True))
        if self.server_gb_s:
            found[self.homes :] = np.array(self.server_gb_s) * 1e9
        return found

    @property
    def keeps(self) -> bool:
        """Returns whether backward has forward's plans: there is one stage, and servers keep q, k and v."""
        return self.stages == 1 and not self.resend

    @property
    def stage_node(self) -> int:
        """Returns how many consecutive ranks of a stage share a node.

        The number is 0 if ``links.ranks_per_node`` is 0 or 1, or if a stage's ranks do not fill whole nodes."""
        size = self.links.ranks_per_node
        return size if size > 1 and self.ranks % size == 0 else 0

    def pool_rank(self, stage: int, rank: int) -> int:
        """Returns the number, among all servers, of data-parallel rank ``rank`` of ``stage``."""
        return stage * self.ranks + rank
