"""The job that is simulated: a model on a cluster with its parallelism, and the seconds of its parts on one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from distca.errors import SimulationError
from distca.models.layer_bytes import Recompute
from distca.models.shape import ModelShape
from distca.plan import AttentionKind, AttentionShape, CostModel, Links
from distca.plan.cost.analytic import cost_of_kind
from distca.plan.cost.linear import LinearRate, NonAttention
from distca.plan.cost.pool import PoolCost
from distca.plan.kinds import by_stage, numbered
from distca.plan.recurrence import Recurrence
from distca.simulate.cluster import Cluster
from distca.simulate.fabric import Fabric
from distca.simulate.layer_seconds import CoreSeconds, LayerSeconds, RowSeconds
from distca.simulate.model import heads_of_rank
from distca.simulate.rates import Rates, load_rates
from distca.sizes.fp8_shapes import Fp8, unfit_widths

Narrow = Literal["float32", "bfloat16"]
Backward = Literal["keep", "resend"]
VALUE, WIDE = 2, 4  # bytes of an activation or weight, and of what is in float32


@dataclass(frozen=True)
class Job:
    """A run whose steps are simulated.

    Attributes:
        model: its shape.
        cluster: where it runs.
        cost: seconds per CA-task of layers without a window, for the heads of one tensor-parallel rank; that of each
            server where they are not alike.
        window_costs: the same by window, where that was measured; others are modelled.
        tp: tensor-parallel ranks, with sequence parallelism; a server is ``tp`` GPUs.
        pp: pipeline stages.
        ep: expert-parallel GPUs, consecutive ones of a stage.
        hide_experts: with DistCA, one nano-batch's rows travel to experts and back beside the other's computation.
        once_per_node: rows for experts travel once to each node that has some of theirs.
        tokens_per_rank: rows of a micro-batch on a data-parallel rank at most.
        micro_batches: of a step.
        recompute: what is computed again in backward.
        keep_outputs: whether outputs of norms and SwiGLU are kept for backward; without recomputation alone.
        backward: whether servers keep rows for DistCA's backward, or home ranks send them again; these with stages.
        fp8: how linear layers scale tensors to FP8, or "none" for bfloat16. The output layer stays in bfloat16.
        gradients: their type, which memory depends on.
        moments: of Adam, likewise.
        plan_by_kind: whether layers with windows have plans of their own; False gives all layers the plan of those
            without, with its rows.
        tolerance: of plans; None takes the one for the size of the pool.
        deal: whether documents are dealt over a step's micro-batches anew.
        level_time: whether a pipeline's phases level linear layers with attention.
        nccl: rows travel by NCCL inside a node too, not only between nodes.
        fused_rotation: whether the baselines' rotation is a kernel of its own.
        rates: of the GPU.
        extra_servers: servers without a model, the cluster's last ones; each is ``tp`` GPUs too.
        home_factors: how many times as long every home's linear layers take as by ``cost`` and ``rates``; none where
            all are alike.
        move_heads: whether context parallelism exchanges the heads of recurrent layers; False counts that as nothing,
            which no way to run them beats.
        move_summaries: whether summaries of recurrent layers travel and are strung together; False counts that as
            nothing, which no way to compose them beats.

    Raises:
        SimulationError: the cluster or the model does not fit the parallelism; FP8 cannot take the model's widths;
            tables are of other heads, or lack linear layers in FP8.
    """

    model: ModelShape
    cluster: Cluster
    cost: CostModel
    tp: int = 1
    pp: int = 1
    ep: int = 1
    hide_experts: bool = False
    once_per_node: bool = False
    tokens_per_rank: int = 131_072
    micro_batches: int = 1
    recompute: Recompute = "none"
    keep_outputs: bool = False
    backward: Backward = "keep"
    fp8: Fp8 = "none"
    gradients: Narrow = "float32"
    moments: Narrow = "float32"
    plan_by_kind: bool = True
    window_costs: Mapping[int, CostModel] = field(default_factory=dict)
    tolerance: float | None = None
    deal: bool = True
    level_time: bool = True
    nccl: bool = False
    fused_rotation: bool = True
    rates: Rates = field(default_factory=load_rates)
    extra_servers: int = 0
    home_factors: tuple[float, ...] = ()
    move_heads: bool = True
    move_summaries: bool = True

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "tokens_per_rank", "micro_batches"):
            if getattr(self, name) < 1:
                raise SimulationError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        kinds = {
            "recompute": Recompute, "backward": Backward, "fp8": Fp8, "gradients": Narrow, "moments": Narrow,
        }  # fmt: skip
        for name, known in ((name, get_args(kind)) for name, kind in kinds.items()):
            if getattr(self, name) not in known:
                raise SimulationError(f"`{name}` is {getattr(self, name)!r}; choose one of {', '.join(known)}.")
        if self.keep_outputs and (self.recompute, self.fp8) != ("none", "none"):
            raise SimulationError(
                f"`keep_outputs` is True, but `recompute` is {self.recompute} and `fp8` {self.fp8}; both must be none."
            )
        wanted = heads_of_rank(self.model, self.tp)
        self._check_parallelism()
        self._check_experts()
        self._check_hybrid()
        self._check_widths()
        self._check_cost(wanted)

    def _check_parallelism(self) -> None:
        cluster = self.cluster
        if cluster.gpus_per_node % self.tp:
            raise SimulationError(
                f"`tp` is {self.tp}, which does not divide the {cluster.gpus_per_node} GPUs of a node; choose one that "
                "does: tensor parallelism stays inside a node."
            )
        homes = cluster.gpus - self.tp * self.extra_servers
        if homes < 1 or homes % (self.tp * self.pp) or self.extra_servers < 0:
            raise SimulationError(
                f"`tp` × `pp` is {self.tp} × {self.pp}, which does not divide the {homes} GPUs; change one of them."
            )
        if len(self.home_factors) not in (0, homes // self.tp):
            count = len(self.home_factors)
            raise SimulationError(f"`home_factors` has {count} numbers, and there are {homes // self.tp} homes.")
        if self.model.layers % self.pp:
            raise SimulationError(
                f"`pp` is {self.pp}, which does not divide the {self.model.layers} layers; stages have equally many."
            )

    def _check_experts(self) -> None:
        experts, ep, ranks = self.model.experts, self.ep, self.cluster.gpus // self.pp
        if wrong := experts.problems(self.model.layers):
            raise SimulationError(f"The model's experts cannot be: {wrong[0]}")
        if ep > 1 and not experts.count:
            raise SimulationError(f"`ep` is {ep}, but the model has no experts; leave it out.")
        if experts.count % ep or ranks % ep or (ep % self.tp and self.tp % ep):
            raise SimulationError(
                f"`ep` is {ep}; it must divide the {experts.count} experts and the {ranks} GPUs of a stage, and be a "
                f"multiple or a divisor of `tp` {self.tp}."
            )
        if experts.count and (self.unlike or self.home_factors):
            raise SimulationError(
                "The model has experts, and servers are not alike, but experts count as if all GPUs were; leave out "
                "`extra_servers`, `home_factors` and costs by server, or take a dense model."
            )
        if experts.count and self.fp8 != "none":
            raise SimulationError(f"`fp8` is {self.fp8}, but experts are computed in bfloat16; set it to none.")
        if experts.shared_ffn % self.tp:
            raise SimulationError(
                f"`tp` is {self.tp}, which does not divide the shared expert's width of {experts.shared_ffn}; choose "
                "one that does."
            )

    def _check_hybrid(self) -> None:
        model, hybrid = self.model, self.model.hybrid
        if not hybrid.pattern:
            return
        if len({*hybrid.of_stages(model.layers, self.pp).split("|")}) > 1:
            raise SimulationError(
                f"`pp` is {self.pp}, with which stages of the pattern {hybrid.pattern!r} have unequal layers; choose "
                "another one."
            )
        if self.fp8 != "none" or self.unlike or self.home_factors:
            raise SimulationError(
                "The model is a hybrid stack, which trains in bfloat16 on servers that are alike; set `fp8` to none "
                "and leave out `extra_servers`, `home_factors` and costs by server."
            )

    def _check_widths(self) -> None:
        model = self.model
        sizes = {name: getattr(model, name) for name in ("hidden", "ffn", "heads", "kv_heads")}
        sizes["head_dim"] = model.resolved_head_dim
        for unfit in unfit_widths(self.fp8, **sizes, tp=self.tp, shared=self.tp > 1):
            raise SimulationError(unfit)

    def _check_cost(self, wanted: AttentionShape) -> None:
        """``wanted``: the heads of a tensor-parallel rank."""
        if self.shape != wanted:
            raise SimulationError(
                f"The cost table is for {self.shape.heads} query heads, {self.shape.kv_heads} key/value heads of size "
                f"{self.shape.head_dim}, but a tensor-parallel rank of this model has {wanted.heads}, "
                f"{wanted.kv_heads} of {wanted.head_dim}; give one that `distca profile` measured for these."
            )
        if self.cost.linear is None:
            raise SimulationError(
                "The cost table has no linear layers; give a `cost_table` that `distca profile` measured."
            )
        if self.cost.linear.in_fp8(self.fp8) is None:
            raise SimulationError(
                f"`fp8` is {self.fp8}, but the cost table does not say what linear layers take so; give a `cost_table` "
                "that `distca profile` measured where Transformer Engine is installed, or set `fp8` to none."
            )

    @property
    def resend(self) -> bool:
        """Whether home ranks send rows again for DistCA's backward."""
        return self.pp > 1 or self.backward == "resend"

    @property
    def output(self) -> LinearRate:
        """The rate of the output layer's matrix products, which stay in bfloat16."""
        assert self.cost.linear is not None
        return self.cost.linear

    @property
    def linear(self) -> LinearRate:
        """The rate of the layers' matrix products."""
        rate = self.output.in_fp8(self.fp8)
        assert rate is not None
        return rate

    @property
    def shape(self) -> AttentionShape:
        """Attention heads of one GPU."""
        return self.cost.shape

    @cached_property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """The kinds of the model's layers."""
        return numbered(self.model.attention_kinds)[0]

    @cached_property
    def costs(self) -> tuple[CostModel, ...]:
        """Seconds per CA-task by kind."""
        return tuple(self.window_costs.get(kind.window) or cost_of_kind(kind, self.cost) for kind in self.kinds)

    @cached_property
    def layer_kinds(self) -> tuple[tuple[int, ...], ...]:
        """The number of the kind of each layer with attention, stage by stage."""
        return by_stage(numbered(self.model.attention_kinds)[1], self.pp)

    @property
    def lse_bytes(self) -> int:
        """Bytes of a row's log-sum-exp."""
        return 4 * self.shape.heads

    @property
    def servers(self) -> int:
        """Ranks of the server pool, over all stages."""
        return self.cluster.gpus // self.tp

    @property
    def data_parallel(self) -> int:
        """Ranks of a stage, context-parallel ones among them."""
        return self.homes // self.pp

    @property
    def homes(self) -> int:
        """Servers with a model, of all stages; the first of the pool."""
        return self.servers - self.extra_servers

    @property
    def unlike(self) -> bool:
        """Whether servers differ in what they have or in their speed."""
        return self.extra_servers > 0 or isinstance(self.cost, PoolCost)

    @property
    def servers_of_experts(self) -> int:
        """The servers whose GPUs share experts."""
        return max(self.ep // self.tp, 1)

    @property
    def layers(self) -> int:
        """The layers of a stage, each with its MLP."""
        return self.model.units // self.pp

    @cached_property
    def recurrent(self) -> tuple[bool, ...]:
        """Whether each layer of a stage is recurrent; stages of a hybrid stack are alike."""
        return tuple(bool(kind.recurrent) for kind in self.model.layer_kinds[: self.layers])

    @cached_property
    def recurrence(self) -> Recurrence:
        """The formula and heads of recurrent cores on a GPU, in a model that has some."""
        return self.model.hybrid.recurrence(self.model.recurrent_layers[0], self.tp)

    @cached_property
    def fabric(self) -> Fabric:
        """Links of the server pool."""
        return Fabric.of(self.cluster, self.tp)

    @cached_property
    def stage_fabric(self) -> Fabric:
        """Links among the data-parallel ranks of one stage."""
        fabric = self.fabric
        return replace(fabric, ranks=self.data_parallel, per_node=min(fabric.per_node, self.data_parallel))

    @property
    def one_sided(self) -> bool:
        """Whether rows travel by NVSHMEM, as transport `auto` has it inside one node; one server sends none."""
        return self.servers > 1 and self.fabric.one_node and not self.nccl

    @property
    def links(self) -> Links:
        """The links as training tells them to the planner."""
        per_node = self.fabric.per_node
        return Links() if self.fabric.one_node else Links(per_node)

    @property
    def head(self) -> float:
        """Seconds per row of the output layer and the loss, which computes its gradients at once."""
        return self.rates.head_s * self.model.hidden * self.model.vocabulary / self.tp

    @cached_property
    def _seconds(self) -> LayerSeconds:
        rates = self.linear, self.output, self.rates
        sizes = self.model, self.layers, self.tp
        return LayerSeconds(*sizes, self.recompute, self.keep_outputs, *rates, self._gathered)

    @cached_property
    def rows(self) -> tuple[RowSeconds, ...]:
        """Seconds per row, by layer of a stage."""
        return self._seconds.rows()

    @cached_property
    def core(self) -> CoreSeconds:
        """Seconds per row of a recurrent core, in a model that has some."""
        return self._seconds.core(self.recurrence)

    @property
    def _gathered(self) -> float:
        """Seconds per row of one all-gather or reduce-scatter of the residual stream over the tensor-parallel ranks."""
        size = self.model.hidden * VALUE * (self.tp - 1) / self.tp
        return size / ((self.cluster.nvlink_collective_gb_s or self.cluster.nvlink_gb_s) * 1e9)

    @property
    def rotation(self) -> float:
        """Seconds per row and layer that a rotation that is not fused takes more, forward and backward."""
        width = self.model.resolved_head_dim * (self.shape.heads + 2 * self.shape.kv_heads)
        return 0.0 if self.fused_rotation else self.rates.rotation_s * width

    @cached_property
    def non_attention(self) -> NonAttention | None:
        """The non-attention time that plans of phases level together with attention, as in training; None where they do
        not."""
        if not self.level_time or (self.pp == 1 and not self.unlike):
            return None
        return replace(self._seconds.non_attention(), factors=self.home_factors)

    @property
    def parameters(self) -> int:
        """The parameters of the fullest stage's rank but for experts: its layers, with embedding or output layer."""
        tables = 2 if self.pp == 1 and not self.model.tie_embeddings else 1
        each = self.model.layer_weights - self.model.routed_weights
        return (self.layers * each + tables * self.model.vocabulary * self.model.hidden) // self.tp

    @property
    def expert_parameters(self) -> int:
        """The parameters of experts on a GPU of the fullest stage."""
        last = self.model.layer_kinds[-self.layers :]
        return sum(kind.mlp.all_experts(self.model.hidden) for kind in last) // self.ep

    @property
    def expert_replicas(self) -> int:
        """The GPUs of a stage that have the same experts."""
        return self.cluster.gpus // (self.pp * self.ep)

    def copied(self, size: np.ndarray) -> np.ndarray:
        """Seconds of copying ``size`` bytes of rows on a GPU."""
        return np.asarray(size / self.rates.copy_bytes_per_s)
