"""Linear layers of Megatron-Core and of Transformer Engine, in bfloat16 and FP8: the same batches in one run.

    torchrun --nproc-per-node 2 -m benchmarks.linears --output FOLDER --modes packed cp2-keep distca --mixes pretrain \\
        --batches 6 --warm-up 2 --traced 0 -- --config configs/llama-8b.yaml --model.layers 4 --model.vocabulary 32000

The whole LLaMA-3 8B on two GPUs, its peak memory measured and predicted:

    torchrun --standalone --nproc-per-node=2 -m benchmarks.linears --linears te current --output FOLDER \\
        --modes distca cp2 --mixes pretrain --contexts 131072 --batches 8 --warm-up 2 --traced 0 \\
        -- --config configs/llama-8b-2-gpus.yaml

Arguments are those of ``benchmarks.throughput``, and ``--linears`` in front of them. Every kind gets a folder of its
own with all that ``benchmarks.throughput`` writes; linears.json and linears.md compare them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

# As benchmarks.throughput; read when CUDA starts.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

from benchmarks.throughput.joining import join_ranks, leave_ranks
from benchmarks.throughput.settings import Settings, parse
from benchmarks.throughput.unused import CONTEXT, STAGES, refuse_unused
from distca.errors import ConfigError, DistcaError
from distca.log import die, setup_logging
from distca.train.config.names import with_settings
from distca.versions import command_line

if TYPE_CHECKING:
    from distca.cluster.world import World

logger = logging.getLogger("distca.benchmarks")

KINDS = {
    "local": ["--train.linears", "local"],
    "te": ["--train.linears", "te"],
    "current": ["--train.linears", "te", "--train.fp8", "current"],
    "current-weights": ["--train.linears", "te", "--train.fp8", "current", "--train.fp8_weights", "true"],
    "delayed": ["--train.linears", "te", "--train.fp8", "delayed"],
    "blockwise": ["--train.linears", "te", "--train.fp8", "blockwise"],
}


def main() -> None:
    """Every rank calls it. A mistake of the user ends in one sentence and exit code 2."""
    setup_logging(int(os.environ.get("RANK", "0")))
    warnings.filterwarnings("ignore")  # megatron-core's, torch's and the kernels', from every rank
    try:
        kinds, rest = _kinds(sys.argv[1:])
        _run(kinds, rest)
    except DistcaError as error:
        die(with_settings(str(error)), error.next_step)


def _kinds(argv: list[str]) -> tuple[list[str], list[str]]:
    """Kinds of linear layers, all unless some are named, and the other arguments."""
    if argv[:1] != ["--linears"]:
        return list(KINDS), argv
    end = next((n for n, word in enumerate(argv[1:], 1) if word.startswith("--")), len(argv))
    for kind in argv[1:end]:
        if kind not in KINDS:
            raise ConfigError(f"--linears is {kind}; it must be one of {', '.join(KINDS)}.")
    return argv[1:end], argv[end:]


def _run(kinds: list[str], argv: list[str]) -> None:
    if "--" not in argv:
        argv = [*argv, "--"]
    refuse_unused(argv[argv.index("--") :], used=(STAGES, CONTEXT))
    size = int(os.environ.get("WORLD_SIZE", "1"))
    every = {kind: parse([*argv, *KINDS[kind]], size) for kind in kinds}
    world = join_ranks(next(iter(every.values())))
    setup_logging(world.rank)
    try:
        compare_kinds(every, world, command_line("torchrun ... -m benchmarks.linears"))
    finally:
        leave_ranks()


def compare_kinds(every: Mapping[str, Settings], world: World, command: str) -> dict[str, Any]:
    """Run every kind's benchmark and write linears.json and linears.md; returns what :func:`compare` does. Every rank
    calls it together.

    Args:
        every: by kind, what is asked for; into one folder.
        world: this process's place.
        command: for the result files.
    """
    from benchmarks.throughput.session import Measured, Session

    reports: dict[str, dict[str, Any]] = {}
    machine: dict[str, Measured] = {}  # by train.fp8: the same products have the same ceilings
    for kind, settings in every.items():
        logger.info("Linear layers: %s", kind)
        own = replace(settings, output=settings.output / kind)
        session = Session(own, world, command, lambda *_: lambda _: None)
        fp8 = own.config.train.fp8
        if fp8 not in machine:
            machine[fp8] = session.machine()
        for apart in session.run(machine[fp8]):
            logger.warning("%s: losses or gradients differ from the first mode's: %s", kind, apart)
        reports[kind] = session.report
        if world.rank == 0:  # after each, so that a time limit leaves the others
            write(settings.output, command, reports)
    return compare(reports)


def write(output: Path, command: str, reports: dict[str, dict[str, Any]]) -> None:
    """linears.json and linears.md from the reports of the kinds that ran."""
    cells = compare(reports)
    output.mkdir(parents=True, exist_ok=True)
    where = {key: next(iter(reports.values()))[key] for key in ("hardware", "versions")}
    (output / "linears.json").write_text(json.dumps({"command": command, **where, "cells": cells}, indent=1) + "\n")
    (output / "linears.md").write_text(table(cells))


def compare(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Figures by workload, mode and kind: tokens/s, over those of the first kind, memory, its peak also predicted,
    seconds of every step, and losses."""
    first = next(iter(reports))
    cells: dict[str, Any] = {}
    for kind, report in reports.items():
        for cell, result in report["cells"].items():
            for mode, made in result["modes"].items():
                rows = cells.setdefault(cell, {}).setdefault(mode, {})
                base = reports[first]["cells"][cell]["modes"].get(mode)
                rows[kind] = {
                    "tokens_per_s": made["tokens_per_s"],
                    "over_first": made["tokens_per_s"] / base["tokens_per_s"] if base else None,
                    "mfu": made["mfu"],
                    "share_of_ceiling": made["share_of_ceiling"],
                    "peak_gib": made["memory_gib"]["max"] if made["memory_gib"] else None,
                    "predicted_gib": made["predicted_gib"],
                    "reserved_gib": made["reserved_gib"],
                    "outside_torch_gib": made["outside_torch_gib"],
                    "recompute": made["recompute"],
                    "steps_s": made["steps_s"],
                    "losses": made["losses"],
                    "gradient_norms": made["gradient_norms"],
                }
    return cells


def table(cells: dict[str, Any]) -> str:
    """One table a workload: modes in rows, kinds in columns."""
    lines = []
    for cell, modes in cells.items():
        kinds = list(next(iter(modes.values())))
        lines += [f"## {cell}", "", "| tokens/s | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
        for mode, rows in modes.items():
            texts = []
            for kind in kinds:
                row = rows.get(kind, {})
                over = row.get("over_first")
                texts.append(f"{row['tokens_per_s']:,.0f} ({over:.3f} ×)" if row and over else "")
            lines.append(f"| {mode} | " + " | ".join(texts) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
