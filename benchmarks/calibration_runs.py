"""Kept runs of ``benchmarks/results`` as jobs of the simulator: the same documents, settings and links."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks.run_costs import costs_of
from benchmarks.throughput.batches import Batches, draw_batches
from benchmarks.throughput.settings import Cell
from distca.baselines import Mode, parse_mode
from distca.baselines.mode import PEERS
from distca.data.corpus import Corpus
from distca.data.sampler import Sampler
from distca.data.sources import open_source
from distca.errors import ConfigError
from distca.models.experts import Experts
from distca.models.hybrid import Hybrid
from distca.models.latent import Latent
from distca.models.rope import RopeScaling
from distca.models.shape import ModelShape
from distca.models.variant import Variant
from distca.plan import StepPlan
from distca.simulate import Cluster, Job, Rates, Workload, dense, simulate
from distca.simulate.cad import planned
from distca.simulate.job import Fp8
from distca.train.config.cli import parse_run_config
from distca.train.config.schema import RunConfig
from distca.train.data.corpus import open_corpus, open_sampler

RESULTS = Path(__file__).parent / "results"
NVSHMEM_GB_S = 370.0
"""The rate of each GPU over NVLink by copy engines (results/transport.json); NCCL's rates are each file's own."""
_NCCL_GB_S = 300.0
"""The rate of each GPU over NVLink by NCCL where a file does not say."""
_SEED = 1234
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
_COUNTS = {"--warm-up": 1, "--batches": 2}
"""Global batches, where a command does not say."""
_FROM_FOLDER = {
    "data.source": "mix",
    "data.path": "prolong-long",
    "data.vocabulary": "2",
    "data.tokens_per_rank": "131072",
    "data.context_length": "131072",
    "data.validation_fraction": "0.2",
}
NOT_EXPRESSED = {
    "linears_8b_2_gpus_fp8_weights.json": "what weights that are FP8 alone take more is not known",
    "training_8b_cut_64k.json": "before the output layer and its loss were one operation, which took twice as long",
    "training_8b_cut_64k_spanning.json": "as training_8b_cut_64k.json",
    "pipeline_8b_cut_64k.json": "as training_8b_cut_64k.json",
    "from_folder_qwen3.json": "there is no cost table for its heads",
    "pipeline_8b_8_layers_128k.json": "what it recomputed cannot be told: its time fits MLPs, its peaks do not",
}
"""Files of training steps that are left out, and why."""


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
        if self._plans is None and self.mode.method == "distca":
            self._plans = [planned(self.job, each) for each in self.batches]
        job = replace(self.job, rates=rates)
        plans: list[StepPlan | None] = list(self._plans) if self._plans else [None] * len(self.batches)
        return [simulate(job, self.mode, each, plan=plan) for each, plan in zip(self.batches, plans, strict=True)]


def kept_files() -> list[str]:
    """Names of all files of training steps that the simulator can express."""
    kinds = ("throughput", "pipeline_8b", "linears", "from_folder", "one_gpu_linears", "one_gpu_keys")
    found = [path.name for kind in kinds for path in sorted(RESULTS.glob(f"{kind}_*.json"))]
    return [name for name in found if name not in NOT_EXPRESSED]


def kept_runs(files: list[str] | None = None) -> list[Run]:
    """The runs of these files, by default of all."""
    found: list[Run] = []
    for name in kept_files() if files is None else files:
        read = next(read for start, read in _READERS.items() if name.startswith(start))
        found += list(read(RESULTS / name))
    return found


def _throughput(path: Path) -> Iterator[Run]:
    return runs_of(path.name, json.loads(path.read_text()))


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
    job = _job(
        model_of(content["model"]),
        content["parallel"]["data_parallel_times_cp"] * parallel["tp"] * parallel["pp"],
        parsed,
        content,
        table_of,
        **parallel,
        tokens_per_rank=content["tokens_per_rank"],
        micro_batches=content["micro_batches"],
        recompute=recompute,
        keep_outputs=figures.get("keep_outputs") == "all",
        backward=figures.get("backward", "keep"),
        fp8=content.get("fp8") or "none",
        gradients=content.get("gradients", "float32"),
        moments=content.get("moments", "float32"),
        hide_experts=recompute != "all",
        tolerance=0.02 if name.removeprefix("throughput_") in _TWO_PERCENT else content.get("tolerance"),
        deal=content.get("deal", False),
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


def _pipeline(path: Path) -> Iterator[Run]:
    content = json.loads(path.read_text())
    command, warm_up = content["command"], content["warm_up_steps"]
    ranks, tp, pp = content["data_parallel"], content["tensor_parallel"], content["stages"]
    model = dense(int(_option(command, "--model.layers", 4)), 4096, 14336, 32, 8, vocabulary=32_000)
    recompute = _option(command, "--train.recompute", "none")
    for case in content["cases"]:
        context = case["context"]
        source = open_source(
            "mix", f"{case['mix']}-long", "bytes", vocabulary=32_000, seed=case.get("seed", _SEED), max_length=context
        )
        documents = Corpus(source, context, "split", 0.0, case.get("seed", _SEED)).train
        for name, figures in case["modes"].items():
            if "refused" in figures:
                continue
            sampler = Sampler(
                documents.lengths, ranks, context, content["micro_batches"], case.get("seed", _SEED), whole=True
            )
            steps = int(_option(command, "--steps", 3))
            drawn = [sampler.next() for _ in range(warm_up + steps)][warm_up:]
            job = _job(
                model,
                ranks * tp * pp,
                parse_mode("distca" if name == "on" else "packed"),
                {"links": None, "link_channels": None},
                tp=tp,
                pp=pp,
                tokens_per_rank=context,
                micro_batches=content["micro_batches"],
                recompute=recompute,
                tolerance=float(_option(command, "--cad.tolerance", 0.005)),
                # Runs that name no level and no tolerance are the newest, with today's default.
                level_time=_option(command, "--cad.level", "time" if "tp2" in path.name else "attention") == "time",
                fused_rotation=False,
            )
            batches = [Workload(each, ranks, whole=True) for each in drawn]
            yield Run(
                path.name,
                f"{case['mix']} {context // 1024}K",
                parse_mode("distca" if name == "on" else "packed"),
                job,
                batches,
                sum(each.tokens for each in batches) / figures["tokens_per_s"],
                [],
                figures["idle_share"]["mean"],
                max(figures["peak_memory_gb_measured"], default=None),
            )


def _linears(path: Path) -> Iterator[Run]:
    """Runs of benchmarks.linears: kinds of linear layers on the same batches."""
    content = json.loads(path.read_text())
    for cell, modes in content["cells"].items():
        mix, context = cell.split()
        where = Cell(mix, int(context.removesuffix("K")) * 1024)
        yield from _side_by_side(path.name, content, where, modes)


def _checkouts(path: Path) -> Iterator[Run]:
    """Runs of benchmarks.throughput in two checkouts."""
    content = json.loads(path.read_text())
    for checkout, found in content["checkouts"].items():
        mix: Any = _option(found["command"], "--mixes", "")
        where = Cell(mix, int(_option(found["command"], "--contexts", 0)))
        modes = {mode: {checkout: figures} for mode, figures in found["modes"].items()}
        yield from _side_by_side(path.name, content | found, where, modes)


def _from_folder(path: Path) -> Iterator[Run]:
    """Runs of benchmarks.from_folder: modes, and a training run, of a model that a Hugging Face folder describes."""
    content = json.loads(path.read_text())
    yield from _side_by_side(path.name, content, Cell("prolong", 131_072), content.get("modes", {}))
    if trained := content.get("trained"):
        config, ranks = _config(content), _gpus(content)
        sampler = open_sampler(config, open_corpus(config).train, ranks)
        steps = [Workload(sampler.next(), ranks) for _ in range(trained["steps"])][-trained["timed_steps"] :]
        times = trained["steps_s"][-trained["timed_steps"] :]
        yield _run(path.name, content, "prolong 128K", "distca", "te", steps, trained | {"steps_s": times})


def _side_by_side(file: str, content: dict[str, Any], where: Cell, modes: dict[str, Any]) -> Iterator[Run]:
    """Runs of ``modes`` by kind of linear layers. What FP8 takes is not known for all shapes, nor what weights that are
    FP8 alone take more."""
    config = _config(content)
    warm_up, batches = (int(_option(content["command"], name, default)) for name, default in _COUNTS.items())
    drawn = draw_batches(
        where,
        warm_up + batches,
        ranks=_gpus(content) // config.parallel.tp,
        tokens_per_rank=config.data.tokens_per_rank,
        micro_batches=config.train.micro_batches,
        vocabulary=config.data.vocabulary or 2,
        seed=config.data.seed,
    )
    measured = [Workload(each, drawn.bins) for each in drawn.global_batches[warm_up:]]
    linear = costs_of("NVIDIA H200", _described(content, config), config.parallel.tp).full.linear
    assert linear is not None
    for mode, kinds in modes.items():
        for kind, figures in kinds.items():
            if linear.in_fp8(_fp8_of(kind)) is not None and not kind.endswith("-weights"):
                yield _run(file, content, where.name, mode, kind, measured, figures)


def _run(
    file: str,
    content: dict[str, Any],
    workload: str,
    mode: str,
    kind: str,
    batches: list[Workload],
    figures: dict[str, Any],
) -> Run:
    """In bfloat16 linear layers of Transformer Engine and of Megatron are one to the simulator."""
    config = _config(content)
    recompute = figures.get("recompute", config.train.recompute)
    job = _job(
        _described(content, config),
        _gpus(content),
        parse_mode(mode),
        {"links": None, "link_channels": None},
        tp=config.parallel.tp,
        tokens_per_rank=config.data.tokens_per_rank,
        micro_batches=config.train.micro_batches,
        recompute="none" if recompute == "auto" else recompute,  # older files do not say that auto took none
        # What cad.backward auto took there.
        backward="resend" if recompute == "all" else "keep",
        fp8=_fp8_of(kind),
        gradients=config.train.gradients,
        moments=config.train.moments,
    )
    memory = figures["peak_gib"] if "peak_gib" in figures else figures["memory_gib"]["max"]
    seconds = sum(each.tokens for each in batches) / figures["tokens_per_s"]
    return Run(
        file, workload, parse_mode(mode), job, batches, seconds, figures.get("steps_s", []), None, memory, linears=kind
    )


def _fp8_of(kind: str) -> Fp8:
    return next((each for each in get_args(Fp8) if each == kind), "none")


def _gpus(content: dict[str, Any]) -> int:
    return int(content["hardware"].split()[0])


def _described(content: dict[str, Any], config: RunConfig) -> ModelShape:
    if "made" not in content:
        shape = config.model
        sizes = (shape.layers, shape.hidden, shape.ffn, shape.heads, shape.kv_heads, shape.resolved_head_dim)
        return dense(*sizes, config.data.vocabulary or 0, tie_embeddings=shape.tie_embeddings)
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    made = content["made"]["config"]
    return dense(
        *(made[name] for name in (*names, "head_dim", "vocab_size")), tie_embeddings=made["tie_word_embeddings"]
    )


def _config(content: dict[str, Any]) -> RunConfig:
    """The settings behind ``--``, and those that benchmarks.from_folder has by itself."""
    words = shlex.split(content["command"].replace("...", ""))
    words = words[words.index("--") + 1 :]
    if words[:1] == ["--config"]:
        words[1] = str(RESULTS.parents[1] / words[1])
    own = _FROM_FOLDER if "made" in content else {}
    return parse_run_config([word for name, value in own.items() for word in (f"--{name}", value)] + words)


_READERS = {
    "throughput": _throughput,
    "pipeline": _pipeline,
    "linears": _linears,
    "one_gpu_linears": _linears,
    "one_gpu_keys": _checkouts,
    "from_folder": _from_folder,
}


def batches_of(content: dict[str, Any], cell: dict[str, Any]) -> Batches:
    """The batches of one workload of a report of ``benchmarks.throughput``, those to warm up first."""
    return draw_batches(
        Cell(cell["mix"], cell["context"]),
        content["warm_up"] + content["batches"],
        ranks=content["parallel"]["data_parallel_times_cp"],
        tokens_per_rank=content["tokens_per_rank"],
        micro_batches=content["micro_batches"],
        vocabulary=content["model"]["vocabulary"],
        seed=content.get("seed") or int(_option(content["command"], "--data.seed", _SEED)),
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


def _job(
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
        one_sided = mode.method == "distca" and not limited
        cluster = Cluster(gpus, gpus, NVSHMEM_GB_S if one_sided else rows, nvlink_collective_gb_s=collectives)
    gpu = content.get("hardware", "1 × NVIDIA H200").split(" × ")[1]
    costs = costs_of(gpu, model, tp, settings.get("fp8", "none"), table_of)
    nccl = limited or per_node > 0
    return Job(model, cluster, costs.full, tp=tp, nccl=nccl, window_costs=costs.windows, **settings)


def _option(command: str, name: str, default: Any) -> str:
    words = shlex.split(re.sub(r"\.\.\.", "", command))
    return words[words.index(name) + 1] if name in words else str(default)


def errors(runs: list[Run], rates: Rates) -> np.ndarray:
    """[N] predicted over measured seconds of every run, less 1."""
    return np.array([sum(p.step_s for p in run.predicted(rates)) / run.seconds - 1 for run in runs])
