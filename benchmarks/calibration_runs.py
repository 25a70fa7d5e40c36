"""The kept runs of ``benchmarks/results`` that the simulator is fitted to and checked with, by kind of report."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks.measured_runs import SEED, Run, job_of, option_of, runs_of
from benchmarks.run_costs import costs_of
from benchmarks.throughput.batches import draw_batches
from benchmarks.throughput.settings import Cell
from distca.baselines import parse_mode
from distca.data.corpus import Corpus
from distca.data.sampler import Sampler
from distca.data.sources import open_source
from distca.models.shape import ModelShape
from distca.simulate import Rates, Workload, dense
from distca.simulate.job import Fp8
from distca.train.config.cli import parse_run_config
from distca.train.config.schema import RunConfig
from distca.train.data.corpus import open_corpus, open_sampler

RESULTS = Path(__file__).parent / "results"
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


def _pipeline(path: Path) -> Iterator[Run]:
    content = json.loads(path.read_text())
    command, warm_up = content["command"], content["warm_up_steps"]
    ranks, tp, pp = content["data_parallel"], content["tensor_parallel"], content["stages"]
    model = dense(int(option_of(command, "--model.layers", 4)), 4096, 14336, 32, 8, vocabulary=32_000)
    recompute = option_of(command, "--train.recompute", "none")
    for case in content["cases"]:
        context = case["context"]
        source = open_source(
            "mix", f"{case['mix']}-long", "bytes", vocabulary=32_000, seed=case.get("seed", SEED), max_length=context
        )
        documents = Corpus(source, context, "split", 0.0, case.get("seed", SEED)).train
        for name, figures in case["modes"].items():
            if "refused" in figures:
                continue
            sampler = Sampler(
                documents.lengths, ranks, context, content["micro_batches"], case.get("seed", SEED), whole=True
            )
            steps = int(option_of(command, "--steps", 3))
            drawn = [sampler.next() for _ in range(warm_up + steps)][warm_up:]
            job = job_of(
                model,
                ranks * tp * pp,
                parse_mode("distca" if name == "on" else "packed"),
                {"links": None, "link_channels": None},
                tp=tp,
                pp=pp,
                tokens_per_rank=context,
                micro_batches=content["micro_batches"],
                recompute=recompute,
                tolerance=float(option_of(command, "--cad.tolerance", 0.005)),
                # Runs that name no level and no tolerance are the newest, with today's default.
                level_time=option_of(command, "--cad.level", "time" if "tp2" in path.name else "attention") == "time",
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
        mix: Any = option_of(found["command"], "--mixes", "")
        where = Cell(mix, int(option_of(found["command"], "--contexts", 0)))
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
    warm_up, batches = (int(option_of(content["command"], name, default)) for name, default in _COUNTS.items())
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
    job = job_of(
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


def errors(runs: list[Run], rates: Rates) -> np.ndarray:
    """[N] predicted over measured seconds of every run, less 1."""
    return np.array([sum(p.step_s for p in run.predicted(rates)) / run.seconds - 1 for run in runs])
