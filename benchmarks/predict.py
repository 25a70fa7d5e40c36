"""A run of the throughput benchmark predicted before it is made, from its own command line and without GPUs.

    python -m benchmarks.predict --ranks 4 --gpu 'NVIDIA H200' --links 280 240 --output predicted.json -- \\
        --output out/run --modes packed cp4-keep distca --contexts 131072 --batches 8 --warm-up 2 -- \\
        --config configs/llama-8b.yaml --model.layers 4 --model.vocabulary 32000 --data.tokens_per_rank 131072
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
import math
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.calibration_runs import Run, batches_of, model_of, run_of
from benchmarks.run_costs import GPUS, costs_of
from benchmarks.throughput.__main__ import asked_of
from benchmarks.throughput.described import described
from benchmarks.throughput.settings import Cell, Settings
from distca.baselines import Mode
from distca.errors import ConfigError, DistcaError
from distca.log import die, setup_logging
from distca.simulate import Prediction, load_rates
from distca.train.config.names import with_settings
from distca.train.run.memory import GIB
from distca.train.run.memory_fit import HostMemory, check_memory, resolve
from distca.versions import command_line, versions, write_report

logger = logging.getLogger("distca.benchmarks")

_MEMORY_GIB = {"NVIDIA H200": 139.8, "NVIDIA H100 80GB HBM3": 79.2}
"""GiB of memory that torch sees, on which depends what ``auto`` takes."""
_LINKS = (280.0, 240.0)
"""GB/s of each of two H200 in an all-to-all and an all-gather (benchmarks/results/throughput_2_gpus_peers_64k.json)."""
_COMPARED = ("tokens_per_s", "idle_share", "memory_gib", "gib_per_step")


def main() -> None:
    """A mistake of the user ends in one sentence and exit code 2."""
    setup_logging(0)
    warnings.filterwarnings("ignore")
    options, asked = _options(sys.argv[1:])
    try:
        if options.beside:
            report = joined(_read(options.predicted), _read(options.beside))
        else:
            report = predicted(asked, options.ranks, options.gpu, tuple(options.links), options.table_of)
    except DistcaError as error:
        die(with_settings(str(error)), error.next_step)
    write_report(options.output, {"command": command_line("python -m benchmarks.predict"), **report})


def _options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own options, and the arguments of the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predict")
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of the run")
    parser.add_argument("--gpu", choices=GPUS, default=GPUS[0])
    parser.add_argument("--links", nargs=2, type=float, default=_LINKS, metavar=("ALL_TO_ALL", "ALL_GATHER"))
    parser.add_argument("--table-of", choices=GPUS, default="", help="stands in for cost tables that the GPU lacks")
    parser.add_argument("--predicted", type=Path, help="with --beside: a file that this command wrote")
    parser.add_argument("--beside", type=Path, help="the benchmark.json of the run")
    split = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:split])
    if bool(options.beside) != bool(options.predicted):
        parser.error("--predicted and --beside go together.")
    return options, argv[split + 1 :]


def predicted(asked: list[str], ranks: int, gpu: str, links: tuple[float, float], table_of: str = "") -> dict[str, Any]:
    """The prediction of a run.

    Args:
        asked: arguments of ``benchmarks.throughput``.
        ranks: GPUs.
        gpu: their kind.
        links: GB/s of each GPU in an all-to-all and in an all-gather.
        table_of: the kind of GPU whose cost tables stand in for missing ones.

    Raises:
        ConfigError: the benchmark would refuse these arguments, or nothing is known of these GPUs.
    """
    settings = asked_of(asked, ranks)
    names = ("all_to_all_gb_per_s", "all_gather_gb_per_s")
    content: dict[str, Any] = {
        "hardware": f"{ranks} × {gpu}",
        **described(settings, ranks),
        "links": dict(zip(names, links, strict=True)),
        "cells": {},
    }
    train = settings.config.train
    notes = costs_of(gpu, model_of(content["model"]), content["parallel"]["tp"], train.fp8, table_of).notes
    for note in notes:
        logger.warning("%s", note)
    rates = load_rates()
    for cell in settings.cells:
        what: dict[str, Any] = {"mix": cell.mix, "context": cell.context, "modes": {}, "not_predicted": {}}
        content["cells"][cell.name] = what
        drawn = batches_of(content, what)
        for mode in settings.modes:
            try:
                chosen = _chosen(mode, settings, cell, ranks, gpu)
                run = run_of("", content, what | {"modes": {mode.name: chosen}}, mode.name, drawn, table_of)
                what["modes"][mode.name] = chosen | figures_of(run, run.predicted(rates))
            except DistcaError as error:
                what["not_predicted"][mode.name] = with_settings(str(error))
                logger.warning("Not predicted: %s on %s: %s", mode.name, cell.name, with_settings(str(error)))
                continue
            _say(mode.name, cell.name, what["modes"][mode.name])
    return {"versions": versions(), "simulated": True, "notes": list(notes), "table_of": table_of, **content}


def _chosen(mode: Mode, settings: Settings, cell: Cell, ranks: int, gpu: str) -> dict[str, Any]:
    """The values that ``auto`` takes in a mode, as its run decides by memory.

    Raises:
        ConfigError: the simulator does not know the mode, or the run would not fit.
    """
    from benchmarks.throughput.measure import config_of
    from megatron_patches.ranks.world import World

    if mode.peer:
        raise ConfigError("The simulator does not know unmodified Megatron-Core.")
    config = config_of(mode, settings, cell, World(0, ranks, torch.device("cuda")))
    device, host, vocabulary = int(_MEMORY_GIB[gpu] * GIB), HostMemory(1, 2**60), config.model.vocabulary
    config = resolve(config, ranks, vocabulary, device, host)
    check_memory(config, ranks, vocabulary, device, host)
    train = config.train
    return {
        "recompute": train.recompute,
        "keep_outputs": train.keep_outputs,
        "offload": train.offload,
        "backward": config.cad.backward,
    }


def figures_of(run: Run, steps: list[Prediction]) -> dict[str, Any]:
    """Figures of a run's predicted steps."""
    seconds = [each.step_s for each in steps]
    return {
        "batches": len(steps),
        "tokens_per_s": sum(each.tokens for each in steps) / sum(seconds),
        "steps_s": seconds,
        "idle_share": statistics.fmean(each.idle_share for each in steps),
        "memory_gib": max(float(each.memory_bytes.max()) for each in steps) / 2**30,
        "gib_per_step": run.job.tp * statistics.fmean(float(each.sent_bytes.sum()) for each in steps) / 2**30,
    }


def _say(mode: str, cell: str, figures: dict[str, Any]) -> None:
    logger.info(
        "%s on %s: %s tokens/s, idle %.1f %%, peak %.1f GiB, %.2f GiB sent per step",
        mode,
        cell,
        f"{figures['tokens_per_s']:,.0f}",
        100 * figures["idle_share"],
        figures["memory_gib"],
        figures["gib_per_step"],
    )


def joined(before: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """A prediction beside what was measured: the error is predicted over measured tokens per second, less 1."""
    cells: dict[str, Any] = {}
    errors, left_out = [], {}
    for name, cell in measured["cells"].items():
        known = before["cells"].get(name, {"modes": {}, "not_predicted": {}})
        for mode, figures in cell["modes"].items():
            if mode not in known["modes"]:
                left_out[f"{name}, {mode}"] = known["not_predicted"].get(mode, "It was not asked for.")
                continue
            ours, theirs = known["modes"][mode], _measured(figures)
            error = ours["tokens_per_s"] / theirs["tokens_per_s"] - 1
            errors.append(error)
            rows = {each: {"predicted": ours[each], "measured": theirs[each]} for each in _COMPARED}
            cells.setdefault(name, {})[mode] = {"error": error, **rows}
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
        "notes": before["notes"],
        "median_error": statistics.median(map(abs, errors)) if errors else None,
        "worst_error": max(errors, key=abs, default=None),
        "not_predicted": left_out,
        "cells": cells,
    }
    if errors:
        logger.info("Median error %.1f %% of %d modes", 100 * found["median_error"], len(errors))
    return found


def _measured(figures: dict[str, Any]) -> dict[str, Any]:
    memory = figures.get("memory_gib")
    return {
        "tokens_per_s": figures["tokens_per_s"],
        "idle_share": figures.get("idle_share"),
        "memory_gib": memory["max"] if isinstance(memory, dict) else memory,
        "gib_per_step": figures.get("bytes_per_step", math.nan) / 2**30,
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}.") from None
    return found


if __name__ == "__main__":
    main()
