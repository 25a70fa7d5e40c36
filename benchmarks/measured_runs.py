"""Measured runs as jobs of the simulator: the same documents, settings and links."""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from benchmarks.run_costs import costs_of
from benchmarks.throughput.batches import Batches, draw_batches
from benchmarks.throughput.settings import Cell
from distca.baselines import Mode, parse_mode
from distca.baselines.mode import PEERS
from distca.errors import ConfigError
from distca.models.experts import Experts
from distca.models.hybrid import Hybrid
from distca.models.latent import Latent
from distca.models.rope import RopeScaling
from distca.models.shape import ModelShape
from distca.models.variant import Variant
from distca.plan import StepPlan
from distca.simulate import Cluster, Job, Rates, Workload, simulate
from distca.simulate.cad import planned

NVSHMEM_GB_S = 370.0
"""The rate of each GPU over NVLink by copy engines (results/transport.json); NCCL's rates are each file's own."""
_NCCL_GB_S = 300.0
"""The rate of each GPU over NVLink by NCCL where a file does not say."""
SEED = 1234
_KEPT_OUTPUTS = ("throughput_2_gpus_peers_64k.json",)
"""Runs that kept outputs of norms and SwiGLU for backward, as their peaks show, from before reports said so."""
_TWO_PERCENT = (
    "2_gpus_30_batches_pretrain_128k.json",
    "2_gpus_30_batches_prolong_128k.json",
    "2_gpus_30_batches_prolong_128k_cp.json",
    "2_gpus_34b_pretrain_128k.json",
    "2_gpus_others_pretrain_128k.json",
    "2_gpus_pretrain_128k.json",
    "2_gpus_pretrain_256k.json",
    "2_gpus_prolong_512k.json",
    "4_gpus_128k.json",
    "4_gpus_prolong_512k.json",
)
"""Runs of throughput whose plans let servers be 2 % apart (results/README.md)."""


@dataclass
class Run:
    """A measured run of one mode. Array legend: B batches.

    Attributes:
        file: its file's name.
        workload: mix and context.
        mode: how it trained.
        job: what the simulator is told, with default rates.
        batches: the documents of every measured batch.
        seconds: measured, of all batches together.
        step_seconds: [B] measured, where they were kept.
        idle: measured idle share of the first batches, or None.
        memory_gib: measured peak of the fullest rank, or None.
        linears: the kind of linear layers, where several ran.
    """

    file: str
    workload: str
    mode: Mode
    job: Job
    batches: list[Workload]
    seconds: float
    step_seconds: list[float]
    idle: float | None
    memory_gib: float | None
    linears: str = ""
    _plans: list[StepPlan] | None = None

    @property
    def name(self) -> str:
        parts = (self.file.removesuffix(".json"), self.workload, self.mode.name, self.linears)
        return " · ".join(part for part in parts if part)

    @property
    def held_out(self) -> bool:
        """A third of the files, by a hash of their names."""
        return hashlib.sha256(self.file.encode()).digest()[0] % 3 == 0

    def predicted(self, rates: Rates) -> list[Any]:
        """A prediction of every batch. Plans do not depend on rates."""
        if self._plans is None and self.mode.disaggregated:
            self._plans = [planned(self.job, each) for each in self.batches]
        job = replace(self.job, rates=rates)
        plans: list[StepPlan | None] = list(self._plans) if self._plans else [None] * len(self.batches)
        return [simulate(job, self.mode, each, plan=plan) for each, plan in zip(self.batches, plans, strict=True)]


def peers_of(content: dict[str, Any]) -> list[str]:
    """The modes of unmodified Megatron-Core in a report of ``benchmarks.throughput``."""
    names = dict.fromkeys(name for cell in content["cells"].values() for name in cell["modes"])
    return [name for name in names if parse_mode(name).method in PEERS]


def runs_of(name: str, content: dict[str, Any], table_of: str = "") -> Iterator[Run]:
    """The runs of a report of ``benchmarks.throughput``, under the name of its file. Those of unmodified Megatron-Core
    are left out: the simulator has no model of its kernels and its context parallelism."""
    for cell in content["cells"].values():
        drawn = workloads_of(content, cell)
        for mode in cell["modes"]:
            if parse_mode(mode).method not in PEERS:
                yield run_of(name, content, cell, mode, drawn, table_of)


def run_of(
    name: str, content: dict[str, Any], cell: dict[str, Any], mode: str, drawn: list[Workload], table_of: str = ""
) -> Run:
    """The run of a ``mode`` on a workload, of which the batches that count are ``drawn``.

    Raises:
        ConfigError, SimulationError: the simulator does not know what ran.
    """
    figures, parsed = cell["modes"][mode], parse_mode(mode)
    if content.get("fp8_weights"):
        raise ConfigError("What weights that are FP8 alone take more is not known.")
    if figures.get("offload", "none") != "none":
        raise ConfigError("What waits in host memory until backward is not known to the simulator.")
    parallel = {way: content["parallel"].get(way, 1) for way in ("tp", "pp", "ep")}
    recompute = figures.get("recompute", content["recompute"])  # what auto took
    job = job_of(
        model_of(content["model"]),
        content["parallel"]["data_parallel_times_cp"] * parallel["tp"] * parallel["pp"],
        parsed,
        content,
        table_of,
        **parallel,
        tokens_per_rank=content["tokens_per_rank"],
        micro_batches=content["micro_batches"],
        recompute=recompute,
        keep_outputs=figures.get("keep_outputs") == "all" or name in _KEPT_OUTPUTS,
        backward=figures.get("backward", "keep"),
        fp8=content.get("fp8") or "none",
        gradients=content.get("gradients", "float32"),
        moments=content.get("moments", "float32"),
        hide_experts=recompute != "all",
        tolerance=0.02 if name.removeprefix("throughput_") in _TWO_PERCENT else content.get("tolerance"),
        deal=content.get("deal", False),
        ping_pong=content.get("ping_pong", True) and not parsed.unsplit,
        fused_rotation="fused" in name or "socket_nodes" in content,
    )
    batches, memory = drawn[: figures.get("batches")], figures.get("memory_gib")
    return Run(
        name,
        Cell(cell["mix"], cell["context"]).name,
        parsed,
        job,
        batches,
        sum(each.tokens for each in batches) / figures.get("tokens_per_s", math.nan),
        figures.get("steps_s", []),
        figures.get("idle_share"),
        memory["max"] if isinstance(memory, dict) else memory,
    )


def batches_of(content: dict[str, Any], cell: dict[str, Any]) -> Batches:
    """The batches of one workload of a report of ``benchmarks.throughput``, those to warm up first."""
    return draw_batches(
        Cell(cell["mix"], cell["context"]),
        content["warm_up"] + content["batches"],
        ranks=content["parallel"]["data_parallel_times_cp"],
        tokens_per_rank=content["tokens_per_rank"],
        micro_batches=content["micro_batches"],
        vocabulary=content["model"]["vocabulary"],
        seed=content.get("seed") or int(option_of(content["command"], "--data.seed", SEED)),
    )


def workloads_of(content: dict[str, Any], cell: dict[str, Any]) -> list[Workload]:
    """The batches of one workload that count."""
    drawn = batches_of(content, cell)
    return [Workload(each, drawn.bins) for each in drawn.global_batches[content["warm_up"] :]]


def model_of(content: dict[str, Any]) -> ModelShape:
    """The shape in a report of ``benchmarks.throughput``; what older reports lack is as it was then."""
    return _shape_of(ModelShape, content)


def _shape_of(kind: type, content: dict[str, Any]) -> Any:
    """A dataclass of the fields in ``content``, with groups of fields in it."""
    groups = {"rope_scaling": RopeScaling, "variant": Variant, "experts": Experts, "hybrid": Hybrid, "latent": Latent}
    known = {each.name for each in fields(kind)} & content.keys()
    return kind(**{name: _shape_of(groups[name], content[name]) if name in groups else content[name] for name in known})


def job_of(
    model: ModelShape, gpus: int, mode: Mode, content: dict[str, Any], table_of: str = "", tp: int = 1, **settings: Any
) -> Job:
    """DistCA's rows go by NVSHMEM, unless links are limited; all else by NCCL at the run's own rates."""
    links, limited = content.get("links") or {}, content["link_channels"] is not None
    rows, collectives = (links.get(f"{name}_gb_per_s", _NCCL_GB_S) for name in ("all_to_all", "all_gather"))
    per_node = int(content.get("socket_nodes", 0))
    if per_node:
        # What is measured over all ranks: a part of an all-to-all stays in the node, and an all-gather enters it once.
        rows, collectives = rows * (gpus - per_node) / max(gpus - 1, 1), collectives / per_node
        cluster = Cluster(gpus, per_node, _NCCL_GB_S, rows, network_collective_gb_s=collectives)
    else:
        one_sided = mode.disaggregated and not limited
        cluster = Cluster(gpus, gpus, NVSHMEM_GB_S if one_sided else rows, nvlink_collective_gb_s=collectives)
    gpu = content.get("hardware", "1 × NVIDIA H200").split(" × ")[1]
    costs = costs_of(gpu, model, tp, settings.get("fp8", "none"), table_of)
    nccl = limited or per_node > 0
    return Job(model, cluster, costs.full, tp=tp, nccl=nccl, window_costs=costs.windows, **settings)


def option_of(command: str, name: str, default: Any) -> str:
    words = shlex.split(re.sub(r"\.\.\.", "", command))
    return words[words.index(name) + 1] if name in words else str(default)
