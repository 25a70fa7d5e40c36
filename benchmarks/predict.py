"""A run of the throughput benchmark predicted before it is made, from its own command line and without GPUs.

    python -m benchmarks.predict --ranks 4 --gpu 'NVIDIA H200' --links 280 240 --output predicted.json -- \\
        --output out/run --modes packed cp4-keep distca --contexts 131072 --batches 8 --warm-up 2 -- \\
        --config configs/llama-8b.yaml --model.layers 4 --model.vocabulary 32000 --data.tokens_per_rank 131072

    python -m benchmarks.predict --of pipeline --ranks 4 --output predicted.json -- --output x.json --pp 2 -- SETTINGS

    python -m benchmarks.predict --predicted predicted.json --beside out/run/benchmark.json --output beside.json

Behind the first ``--`` are the arguments of ``benchmarks.throughput``, with the model's settings behind another one.
``--links`` are GB/s of each GPU in an all-to-all and an all-gather of NCCL, as a run keeps them under ``links``.
NVSHMEM has a rate of its own. Documents, plans and what ``auto`` takes are those of the run.

``--beside`` joins a prediction with what was measured, by workload and mode, with errors. A mode that cannot be
predicted is named with the reason, and so is every cost that was not measured on the GPU itself. ``--table-of`` names
the GPU whose tables of core attention stand in for those that ``--gpu`` lacks: an H100 has the multiprocessors of an
H200, and less bandwidth and memory. Matrix products are always the GPU's own.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import pipeline
from benchmarks.measured_runs import Run, model_of, run_of, workloads_of
from benchmarks.run_costs import GPUS, costs_of
from benchmarks.throughput.__main__ import asked_of
from benchmarks.throughput.described import config_described, described
from benchmarks.throughput.settings import Cell
from distca.baselines import Mode
from distca.cluster.world import World
from distca.errors import ConfigError, DistcaError
from distca.log import die, setup_logging
from distca.simulate import Prediction, Workload, load_rates
from distca.train.config.names import with_settings
from distca.train.config.schema import RunConfig
from distca.train.data.corpus import open_corpus, open_sampler
from distca.train.run.memory import GIB
from distca.train.run.memory_fit import HostMemory, check_memory, resolve
from distca.versions import command_line, versions, write_report

logger = logging.getLogger("distca.benchmarks")

_MEMORY_GIB = {"NVIDIA H200": 139.8, "NVIDIA H100 80GB HBM3": 79.2}
"""GiB of memory that torch sees, on which depends what ``auto`` takes."""
_LINKS = (280.0, 240.0)
"""GB/s of each of two H200 in an all-to-all and an all-gather (benchmarks/results/throughput_2_gpus_peers_64k.json)."""
_COMPARED = ("tokens_per_s", "idle_share", "memory_gib", "gib_per_step")
_RUN = ("warm_up", "tokens_per_rank", "micro_batches", "seed", "fp8", "link_channels", "socket_nodes")
_ALIKE = ("model", "parallel", *_RUN)
"""Facts that a prediction and its run agree on, where both name them."""


def main() -> None:
    """A mistake of the user ends in one sentence and exit code 2."""
    setup_logging(0)
    warnings.filterwarnings("ignore")
    options, asked = _options(sys.argv[1:])
    try:
        if options.beside:
            report = joined(*_read_both(options.predicted, options.beside))
        else:
            machine = Machine(options.ranks, options.gpu, tuple(options.links), options.table_of)
            report = predicted(asked, machine, options.of)
    except DistcaError as error:
        die(with_settings(str(error)), error.next_step)
    write_report(options.output, {"command": command_line("python -m benchmarks.predict"), **report})


def _options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own options, and the arguments of the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predict")
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of the run")
    parser.add_argument("--of", choices=_BENCHMARKS, default="throughput", help="the benchmark")
    parser.add_argument("--gpu", choices=GPUS, default=GPUS[0])
    parser.add_argument("--links", nargs=2, type=float, default=_LINKS, metavar=("ALL_TO_ALL", "ALL_GATHER"))
    parser.add_argument("--table-of", choices=GPUS, default="", help="stands in for cost tables that the GPU lacks")
    parser.add_argument("--predicted", type=Path, help="with --beside: a file that this command wrote")
    parser.add_argument("--beside", type=Path, help="the benchmark.json of the run")
    split = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:split])
    if bool(options.beside) != bool(options.predicted):
        parser.error("--predicted and --beside go together.")
    if options.table_of == options.gpu:
        parser.error(f"--table-of is {options.gpu}, as --gpu is; name the other one, or leave it out.")
    return options, argv[split + 1 :]


@dataclass(frozen=True)
class Machine:
    """The GPUs of a run.

    Attributes:
        ranks: how many.
        gpu: their kind.
        links: GB/s of each GPU in an all-to-all and in an all-gather of NCCL.
        table_of: the kind of GPU whose cost tables stand in for missing ones; empty for none.
    """

    ranks: int
    gpu: str = GPUS[0]
    links: tuple[float, float] = _LINKS
    table_of: str = ""

    @property
    def described(self) -> dict[str, Any]:
        """GPUs and links, as in the report of a run."""
        names = ("all_to_all_gb_per_s", "all_gather_gb_per_s")
        return {"hardware": f"{self.ranks} × {self.gpu}", "links": dict(zip(names, self.links, strict=True))}


@dataclass(frozen=True)
class Trial:
    """A mode on a workload.

    Attributes:
        workload: its name.
        name: of the mode in the benchmark's report.
        mode: how it trains.
        config: its settings.
        described: what it depends on, as in a report of ``benchmarks.throughput``.
        cell: mix and context.
        batches: the documents of every batch that counts.
    """

    workload: str
    name: str
    mode: Mode
    config: RunConfig
    described: dict[str, Any]
    cell: dict[str, Any]
    batches: list[Workload]


def predicted(asked: list[str], machine: Machine, of: str = "throughput") -> dict[str, Any]:
    """The prediction of a run.

    Args:
        asked: arguments of the benchmark.
        machine: the GPUs.
        of: the benchmark, throughput or pipeline.

    Raises:
        ConfigError: the benchmark would refuse these arguments, or a cost table is missing.
    """
    trials = list(_BENCHMARKS[of](asked, machine))
    first = trials[0].described
    costs = costs_of(machine.gpu, model_of(first["model"]), first["parallel"]["tp"], first["fp8"], machine.table_of)
    for note in costs.notes:
        logger.warning("%s", note)
    cells: dict[str, Any] = {}
    for trial in trials:
        cell = cells.setdefault(trial.workload, {"modes": {}, "not_predicted": {}})
        try:
            cell["modes"][trial.name] = found = _predicted(trial, machine)
        except DistcaError as error:
            cell["not_predicted"][trial.name] = why = with_settings(str(error))
            logger.warning("Not predicted: %s on %s: %s", trial.name, trial.workload, why)
        else:
            _say(trial, found)
    known = {"versions": versions(), "simulated": True, "notes": list(costs.notes), "table_of": machine.table_of}
    return known | first | {"cells": cells}


def _throughput(asked: list[str], machine: Machine) -> Iterator[Trial]:
    from benchmarks.throughput.measure import config_of

    settings = asked_of(asked, machine.ranks)
    content = machine.described | described(settings, machine.ranks)
    for cell in settings.cells:
        what = {"mix": cell.mix, "context": cell.context}
        drawn = workloads_of(content, what)
        for mode in settings.modes:
            config = config_of(mode, settings, cell, _world(machine))
            yield Trial(cell.name, mode.name, mode, config, content, what, drawn)


def _pipeline(asked: list[str], machine: Machine) -> Iterator[Trial]:
    arguments = pipeline.arguments_of(asked, machine.ranks)
    if arguments.ranks != machine.ranks:
        raise ConfigError(f"--ranks is {machine.ranks}, and that of the benchmark {arguments.ranks}; give one number.")
    for case in pipeline.cases_of(arguments):
        for name in arguments.modes:
            config = pipeline.config_of(arguments, case, name, Path("unused"))
            corpus, ranks = open_corpus(config), config.parallel.data_parallel(machine.ranks)
            config = replace(config, model=replace(config.model, vocabulary=corpus.vocabulary))
            sampler = open_sampler(config, corpus.train, ranks)
            batches = [Workload(sampler.next(), ranks, whole=True) for _ in range(config.train.steps)]
            limits = {"link_channels": None, "socket_nodes": False}
            content = machine.described | limits | config_described(config, machine.ranks)
            mode = Mode("distca" if config.cad.enabled else "packed")
            yield Trial(workload_of(case), name, mode, config, content, case, batches[arguments.warm_up :])


_BENCHMARKS = {"throughput": _throughput, "pipeline": _pipeline}


def workload_of(case: dict[str, Any]) -> str:
    """The name of a pipeline's workload."""
    return f"{Cell(case['mix'], case['context']).name}, seed {case.get('seed', 1234)}"


def _predicted(trial: Trial, machine: Machine) -> dict[str, Any]:
    """The figures of a mode, with what ``auto`` takes, as its run decides by memory.

    Raises:
        DistcaError: the simulator does not know the mode, documents do not fit into it, or it not into memory.
    """
    if trial.mode.peer:
        raise ConfigError("The simulator does not know unmodified Megatron-Core.")
    device, host, vocabulary = int(_MEMORY_GIB[machine.gpu] * GIB), HostMemory(1, 2**60), trial.config.model.vocabulary
    config = resolve(trial.config, machine.ranks, vocabulary, device, host)
    check_memory(config, machine.ranks, vocabulary, device, host)
    chosen = {
        "recompute": config.train.recompute,
        "keep_outputs": config.train.keep_outputs,
        "offload": config.train.offload,
        "backward": config.cad.backward,
    }
    cell = trial.cell | {"modes": {trial.mode.name: chosen}}
    run = run_of("", trial.described, cell, trial.mode.name, trial.batches, machine.table_of)
    return chosen | figures_of(run, run.predicted(load_rates()))


def _world(machine: Machine) -> World:
    return World(0, machine.ranks, torch.device("cuda"))


def figures_of(run: Run, steps: list[Prediction]) -> dict[str, Any]:
    """Figures of a run's predicted steps."""
    seconds = [each.step_s for each in steps]
    return {
        "batches": len(steps),
        "tokens": [each.tokens for each in steps],
        "tokens_per_s": sum(each.tokens for each in steps) / sum(seconds),
        "steps_s": seconds,
        "idle_share": statistics.fmean(each.idle_share for each in steps),
        "memory_gib": max(float(each.memory_bytes.max()) for each in steps) / 2**30,
        "gib_per_step": run.job.tp * statistics.fmean(float(each.sent_bytes.sum()) for each in steps) / 2**30,
    }


def _say(trial: Trial, figures: dict[str, Any]) -> None:
    logger.info(
        "%s on %s: %s tokens/s, idle %.1f %%, peak %.1f GiB, %.2f GiB sent per step",
        trial.name,
        trial.workload,
        f"{figures['tokens_per_s']:,.0f}",
        100 * figures["idle_share"],
        figures["memory_gib"],
        figures["gib_per_step"],
    )


def joined(before: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """A prediction beside what was measured: the error is predicted over measured tokens per second, less 1.

    Raises:
        ConfigError: it is the prediction of another run, or of fewer batches.
    """
    apart = [name for name in _ALIKE if name in before and name in measured and _differ(before[name], measured[name])]
    if apart:
        raise ConfigError(f"The prediction is of a run with another {', another '.join(apart)}; predict this one.")
    if before["hardware"] != measured["hardware"]:
        logger.warning("Predicted for %s, measured on %s.", before["hardware"], measured["hardware"])
    cells: dict[str, Any] = {}
    errors, by_step, left_out = [], list[float](), {}
    for name, cell in cells_of(measured).items():
        known = before["cells"].get(name, {"modes": {}, "not_predicted": {}})
        for mode, figures in cell["modes"].items():
            if mode not in known["modes"]:
                left_out[f"{name}, {mode}"] = known["not_predicted"].get(mode, "It was not asked for.")
                continue
            ours = _of_first(known["modes"][mode], figures.get("batches"))
            theirs = _measured(figures)
            error = ours["tokens_per_s"] / theirs["tokens_per_s"] - 1
            errors.append(error)
            rows = {each: {"predicted": ours[each], "measured": theirs[each]} for each in _COMPARED}
            steps = _step_errors(ours["steps_s"], figures.get("steps_s", ()))
            cells.setdefault(name, {})[mode] = {"error": error, "step_errors": steps, **rows}
            by_step += steps
            logger.info(
                "%s on %s: predicted %s, measured %s tokens/s, %+.1f %%",
                mode,
                name,
                *(f"{each['tokens_per_s']:,.0f}" for each in (ours, theirs)),
                100 * error,
            )
    found = {
        "predicted_by": before["command"],
        "measured_by": measured["command"],
        "hardware": {"predicted": before["hardware"], "measured": measured["hardware"]},
        "notes": before["notes"],
        "median_error": statistics.median(map(abs, errors)) if errors else None,
        "worst_error": max(errors, key=abs, default=None),
        "median_step_error": statistics.median(map(abs, by_step)) if by_step else None,
        "not_predicted": left_out,
        "cells": cells,
    }
    if errors:
        logger.info("Median error %.1f %% of %d modes", 100 * found["median_error"], len(errors))
    return found


def _differ(ours: Any, theirs: Any) -> bool:
    """Returns whether two facts differ; of groups of settings only what both name, as older reports lack some."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return any(_differ(ours[name], theirs[name]) for name in ours.keys() & theirs.keys())
    return bool(ours != theirs)


def _of_first(predicted: dict[str, Any], batches: int | None) -> dict[str, Any]:
    """A mode's prediction, its speed over so many batches: a run that was ended measured fewer.

    Raises:
        ConfigError: so many were not predicted.
    """
    known = len(predicted["steps_s"])
    if batches in (None, known):
        return predicted
    if batches > known:
        raise ConfigError(f"The prediction has batches {known}, and the run {batches}; predict as many.")
    tokens, seconds = (predicted[name][:batches] for name in ("tokens", "steps_s"))
    return predicted | {"tokens_per_s": sum(tokens) / sum(seconds), "steps_s": seconds}


def _step_errors(predicted_s: list[float], measured_s: Sequence[float]) -> list[float]:
    """Returns for each step predicted over measured tokens per second, less 1."""
    return [theirs / ours - 1 for ours, theirs in zip(predicted_s, measured_s, strict=True)] if measured_s else []


def cells_of(measured: dict[str, Any]) -> dict[str, Any]:
    """The workloads of a report of either benchmark, by name."""
    if "cases" not in measured:
        found: dict[str, Any] = measured["cells"]
        return found
    ran: dict[str, Any] = {}
    for case in measured["cases"]:
        modes = {mode: figures for mode, figures in case["modes"].items() if "refused" not in figures}
        ran[workload_of(case)] = {"modes": modes}
    return ran


def _measured(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of a mode that are compared, in either benchmark's report; None for what it does not say."""
    idle, sent = figures.get("idle_share"), figures.get("bytes_per_step")
    memory = figures.get("memory_gib", figures.get("peak_memory_gb_measured"))
    return {
        "tokens_per_s": figures["tokens_per_s"],
        "idle_share": idle["mean"] if isinstance(idle, dict) else idle,
        "memory_gib": memory["max"] if isinstance(memory, dict) else max(memory, default=None) if memory else None,
        "gib_per_step": None if sent is None else sent / 2**30,
    }


def _read_both(predicted: Path, beside: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the contents of a prediction and of a run's report.

    Raises:
        ConfigError: one of them is something else.
    """
    before, measured = _read(predicted), _read(beside)
    for path, content, simulated in ((predicted, before, True), (beside, measured, False)):
        known = isinstance(content, dict) and ("cells" in content or "cases" in content)
        if not known or content.get("simulated", False) != simulated:
            what = "a prediction by this command" if simulated else "the benchmark.json of a run"
            raise ConfigError(f"{path} is not {what}; give one.")
    return before, measured


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}.") from None
    return found


if __name__ == "__main__":
    main()
