"""The simulated job: a model, a cluster and its parallelism; and the seconds of the job's parts on one GPU.

Terms: a *server* stands for the ``tp`` GPUs that share rows; all servers of all pipeline stages compute core attention
for each other. *Homes* are the servers that hold documents' rows and a model. A task of core attention is a range of a
document's queries with all keys up to them; a cost table has its seconds.
"""

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
VALUE, WIDE = 2, 4
"""Bytes of a bfloat16 number, as activations and weights are, and of a float32 number."""


@dataclass(frozen=True)
class Job:
    """A run whose steps are simulated.

    Attributes:
        model: the model's shape.
        cluster: the GPUs and links.
        cost: seconds of attention tasks in layers without a window, for the heads of one tensor-parallel rank. Servers
            of unlike speed have a table each.
        window_costs: by window, the seconds of tasks where that window was measured; other windows are modelled.
        tp: number of tensor-parallel ranks, which use sequence parallelism.
        pp: number of pipeline stages.
        ep: number of GPUs that share a layer's experts; they follow each other in a stage.
        hide_experts: with DistCA, whether one nano-batch's exchanges with experts run beside the other's computation.
        once_per_node: whether a row for experts travels once to each node, and is handed on there.
        tokens_per_rank: most rows of a micro-batch on a data-parallel rank.
        micro_batches: number of micro-batches of a step.
        recompute: the part that backward recomputes.
        keep_outputs: whether outputs of norms and SwiGLU are kept for backward; only without recomputation and FP8.
        ping_pong: whether DistCA cuts a micro-batch into two nano-batches. False makes it wait for every transfer.
        backward: "keep" if servers keep rows for DistCA's backward, "resend" if homes send them again. Pipelines always
            resend.
        fp8: how linear layers scale tensors to FP8, or "none" for bfloat16. The output layer stays in bfloat16.
        gradients: the dtype of gradients, for memory.
        moments: the dtype of Adam's moments, for memory.
        plan_by_kind: True makes plans for layers with and without windows. False gives all layers the plan of layers
            without a window, with the rows that move in it.
        tolerance: the planner's tolerance; None takes the default for the number of servers.
        deal: whether documents are dealt over a step's micro-batches anew.
        level_time: whether plans of a pipeline level the sum of linear layers and attention.
        nccl: True moves rows by NCCL inside a node too. False moves them by NVSHMEM if there is one node.
        fused_rotation: whether the baselines' rotation of queries and keys is fused.
        rates: further speeds of the GPU.
        extra_servers: number of servers without a model, the last ones of the cluster, of ``tp`` GPUs each.
        home_factors: for each home, the factor by which its linear layers are slower than ``cost`` and ``rates`` say;
            empty where all homes are alike.
        move_heads: whether context parallelism exchanges the heads of recurrent layers. False counts no time for it,
            which is a bound for any way to do it.
        move_summaries: whether DistCA exchanges and combines summaries of recurrent layers. False counts no time for
            it, which is a bound for any way to do it.

    Raises:
        SimulationError: the cluster or the model does not fit the parallelism; FP8 cannot take the model's widths; or
            the cost table is for other heads, or has no linear layers, or none in FP8.
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
    ping_pong: bool = True
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
        for name in ("tp", "pp", "ep", "tokens_per_rank", "micro_batches"):
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
        experts, ep, ranks = self.model.experts, self.ep, self.data_parallel * self.tp
        if wrong := experts.problems(self.model.layers):
            raise SimulationError(f"The model's experts cannot be: {wrong[0]}")
        if ep > 1 and not experts.count:
            raise SimulationError(f"`ep` is {ep}, but the model has no experts; leave it out.")
        if experts.count % ep or ranks % ep or (ep % self.tp and self.tp % ep):
            raise SimulationError(
                f"`ep` is {ep}; it must divide the {experts.count} experts and the {ranks} GPUs of a stage, and be a "
                f"multiple or a divisor of `tp` {self.tp}."
            )
        if experts.count and not self._homes_alike:
            raise SimulationError(
                "The model has experts, and homes are not alike, but experts count as if all homes were; leave out "
                "`home_factors` and costs that differ between homes, or take a dense model."
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
        if self.fp8 != "none" or not self._homes_alike:
            raise SimulationError(
                "The model is a hybrid stack, which trains in bfloat16 on homes that are alike; set `fp8` to none and "
                "leave out `home_factors` and costs that differ between homes."
            )

    def _check_widths(self) -> None:
        model = self.model
        sizes = {name: getattr(model, name) for name in ("hidden", "ffn", "heads", "kv_heads")}
        sizes["head_dim"] = model.resolved_head_dim
        for unfit in unfit_widths(self.fp8, **sizes, tp=self.tp, shared=self.tp > 1):
            raise SimulationError(unfit)

    def _check_cost(self, wanted: AttentionShape) -> None:
        """Refuses a cost table for other heads than ``wanted``, or without the linear layers that are needed."""
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
        """Whether homes send rows again for DistCA's backward."""
        return self.pp > 1 or self.backward == "resend"

    @property
    def nano_batches(self) -> int:
        """The number of nano-batches of a micro-batch with DistCA."""
        return 2 if self.ping_pong else 1

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
        """The attention heads of one GPU."""
        return self.cost.shape

    @cached_property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """The kinds of attention layers in the model, each once."""
        return numbered(self.model.attention_kinds)[0]

    @cached_property
    def costs(self) -> tuple[CostModel, ...]:
        """For each kind, the seconds of its tasks."""
        return tuple(self.window_costs.get(kind.window) or cost_of_kind(kind, self.cost) for kind in self.kinds)

    @cached_property
    def layer_kinds(self) -> tuple[tuple[int, ...], ...]:
        """For each stage and each of its attention layers, the number of the layer's kind."""
        return by_stage(numbered(self.model.attention_kinds)[1], self.pp)

    @property
    def lse_bytes(self) -> int:
        """Bytes of a row's log-sum-exp."""
        return 4 * self.shape.heads

    @property
    def servers(self) -> int:
        """The number of servers of all stages, with and without a model."""
        return self.cluster.gpus // self.tp

    @property
    def data_parallel(self) -> int:
        """The number of data-parallel ranks of a stage; context-parallel groups are made of them."""
        return self.homes // self.pp

    @property
    def homes(self) -> int:
        """The number of servers with a model, of all stages; they come before those without."""
        return self.servers - self.extra_servers

    @property
    def unlike(self) -> bool:
        """Whether some servers have no model or another speed."""
        return self.extra_servers > 0 or isinstance(self.cost, PoolCost)

    @property
    def _homes_alike(self) -> bool:
        """Whether all homes have the same speed; servers without a model may have another one."""
        return not self.home_factors and not (
            isinstance(self.cost, PoolCost) and len({*self.cost.of_server[: self.homes]}) > 1
        )

    @property
    def servers_of_experts(self) -> int:
        """The number of homes whose GPUs share a layer's experts."""
        return max(self.ep // self.tp, 1)

    @property
    def layers(self) -> int:
        """The number of a stage's layers, each with its MLP."""
        return self.model.units // self.pp

    @cached_property
    def recurrent(self) -> tuple[bool, ...]:
        """For each layer of a stage, whether it is recurrent; stages are alike."""
        return tuple(bool(kind.recurrent) for kind in self.model.layer_kinds[: self.layers])

    @cached_property
    def recurrence(self) -> Recurrence:
        """The formula and the heads on a GPU of recurrent layers; only in a model that has some."""
        return self.model.hybrid.recurrence(self.model.recurrent_layers[0], self.tp)

    @cached_property
    def fabric(self) -> Fabric:
        """The links between all servers."""
        return Fabric.of(self.cluster, self.tp)

    @cached_property
    def stage_fabric(self) -> Fabric:
        """The links between the data-parallel ranks of one stage."""
        fabric = self.fabric
        return replace(fabric, ranks=self.data_parallel, per_node=min(fabric.per_node, self.data_parallel))

    @property
    def one_sided(self) -> bool:
        """Whether rows travel by NVSHMEM. As with transport `auto` they do inside a single node."""
        return self.servers > 1 and self.fabric.one_node and not self.nccl

    @property
    def links(self) -> Links:
        """The planner's description of the links, as in training."""
        per_node = self.fabric.per_node
        return Links() if self.fabric.one_node else Links(per_node)

    @property
    def head(self) -> float:
        """Seconds per row of the output layer and the loss. Gradients count too, as forward computes them."""
        return self.rates.head_s * self.model.hidden * self.model.vocabulary / self.tp

    @cached_property
    def _seconds(self) -> LayerSeconds:
        rates = self.linear, self.output, self.rates
        sizes = self.model, self.layers, self.tp
        return LayerSeconds(*sizes, self.recompute, self.keep_outputs, *rates, self._gathered)

    @cached_property
    def rows(self) -> tuple[RowSeconds, ...]:
        """For each layer of a stage, the seconds per row without core attention."""
        return self._seconds.rows()

    @cached_property
    def core(self) -> CoreSeconds:
        """Seconds per row of recurrent cores; only in a model that has some."""
        return self._seconds.core(self.recurrence)

    def residual_bytes(self, rows: np.ndarray) -> np.ndarray:
        """Returns the bytes of a GPU's share of ``rows`` of the residual stream, or of their gradients."""
        return np.asarray(rows * self.model.hidden * VALUE / self.tp)

    @property
    def _gathered(self) -> float:
        """Seconds per row of one all-gather or reduce-scatter of the residual stream over the tensor-parallel ranks."""
        size = self.model.hidden * VALUE * (self.tp - 1) / self.tp
        return size / ((self.cluster.nvlink_collective_gb_s or self.cluster.nvlink_gb_s) * 1e9)

    @property
    def rotation(self) -> float:
        """Further seconds per row and layer, forward and backward, where the rotation is not fused."""
        width = self.model.resolved_head_dim * (self.shape.heads + 2 * self.shape.kv_heads)
        return 0.0 if self.fused_rotation else self.rates.rotation_s * width

    @cached_property
    def non_attention(self) -> NonAttention | None:
        """The seconds beside core attention that plans level together with attention; None where plans level attention
        alone."""
        if not (self.level_time and self.ping_pong) or (self.pp == 1 and not self.unlike):
            return None
        return replace(self._seconds.non_attention(), factors=self.home_factors)

    @property
    def parameters(self) -> int:
        """The number of parameters on a GPU of the fullest stage, with embedding or output layer, without experts."""
        tables = 2 if self.pp == 1 and not self.model.tie_embeddings else 1
        model = self.model
        replicated = model.replicated_weights
        shared = self.layers * (model.layer_weights - model.routed_weights - replicated)
        return (shared + tables * model.vocabulary * model.hidden) // self.tp + self.layers * replicated

    @property
    def expert_parameters(self) -> int:
        """The number of experts' parameters on a GPU of the fullest stage."""
        last = self.model.layer_kinds[-self.layers :]
        return sum(kind.mlp.all_experts(self.model.hidden) for kind in last) // self.ep

    @property
    def expert_replicas(self) -> int:
        """The number of GPUs of a stage with the same experts."""
        return self.data_parallel * self.tp // self.ep

    def copied(self, size: np.ndarray) -> np.ndarray:
        """Returns the seconds in which a GPU copies ``size`` bytes of rows."""
        return np.asarray(size / self.rates.copy_bytes_per_s)
