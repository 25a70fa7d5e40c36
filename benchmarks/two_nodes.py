"""Two GPUs of one machine as two nodes over sockets: DistCA, packed documents and context parallelism, measured with
the same code over the same links, and what the simulator predicts for them.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.two_nodes --runs 4x2 1x3 --output FOLDER \\
        --modes distca packed packed-dealt cp2-keep --mixes pretrain --warm-up 1 --traced 0 -- \\
        --config configs/llama-8b.yaml --parallel.tp 1 --model.layers 4 --model.vocabulary 32000 \\
        --data.tokens_per_rank 131072 --train.recompute none
    python -m benchmarks.two_nodes --compare FOLDER --beside ../checkout-of-2026-11-22

``--runs`` names micro-batches x measured global batches, all in one start of the ranks; a warm-up batch is one
micro-batch. Other arguments are those of ``benchmarks.throughput``. Every run gets a folder of its own, such as
FOLDER/4x2, with all that ``benchmarks.throughput`` writes.

What needs no GPUs: ``--compare`` reads these folders and writes comparison.json: measured and predicted tokens per
second, and bytes; modes of unmodified Megatron-Core are named and left out, as the simulator does not know them.
``--beside`` adds what the planner of another checkout moves for the same micro-batches. ``--table-of`` is that of
``benchmarks.predict``, which predicts such runs before they are made.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import re
import shlex
import subprocess
import sys
import warnings
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

if TYPE_CHECKING:
    from benchmarks.measured_runs import Run

logger = logging.getLogger("distca.benchmarks")

# Runs in any checkout since 2026-11-22: bytes of one layer for micro-batches of these lengths.
_MOVED = """
import json, sys
from distca.plan import analytic_cost, plan_micro_batch, training_tolerance
given = json.load(sys.stdin)
ranks = given["ranks"]
cost, how = analytic_cost(*given["heads"]), {"tolerance": training_tolerance(ranks)}
how["nano_batches"] = given["nano_batches"]
print(sum(plan_micro_batch(each, ranks, cost, **how).bytes_moved.total for each in given["lengths"]))
"""


def main() -> None:
    """Every rank calls it. A mistake of the user ends in one sentence and exit code 2."""
    setup_logging(int(os.environ.get("RANK", "0")))
    warnings.filterwarnings("ignore")  # megatron-core's, torch's and the kernels', from every rank
    try:
        if sys.argv[1:2] == ["--compare"]:
            _compare(sys.argv[1:])
        else:
            _measure(sys.argv[1:])
    except DistcaError as error:
        die(with_settings(str(error)), error.next_step)


def _runs(argv: list[str]) -> tuple[list[tuple[int, int]], list[str]]:
    """(micro-batches, measured batches) of every run, and the other arguments."""
    if argv[:1] != ["--runs"]:
        raise ConfigError("--runs comes first, with micro-batches x batches of every run, such as --runs 4x2 1x3.")
    end = next((n for n, word in enumerate(argv[1:], 1) if word.startswith("--")), len(argv))
    found = [re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", word) for word in argv[1:end]]
    if not found or None in found:
        raise ConfigError(f"--runs is {' '.join(argv[1:end])!r}; give micro-batches x batches, such as 4x2 1x3.")
    return [(int(match[1]), int(match[2])) for match in found if match], argv[end:]


def _settings(argv: list[str], ranks: int) -> dict[str, Settings]:
    """The arguments of every run, by the name of its folder."""
    runs, argv = _runs(argv)
    split = argv.index("--") if "--" in argv else len(argv)
    refuse_unused(argv[split:], used=(STAGES, CONTEXT))
    found = {}
    for micro_batches, batches in runs:
        own = [*argv[:split], "--socket-nodes", "--short-warm-up", "--batches", str(batches)]
        settings = parse([*own, "--", *argv[split + 1 :], "--train.micro_batches", str(micro_batches)], ranks)
        name = f"{micro_batches}x{batches}"
        found[name] = replace(settings, output=settings.output / name)
    return found


def _measure(argv: list[str]) -> None:
    from distca.testing.shared_gpus import each_a_machine

    every = _settings(argv, int(os.environ.get("WORLD_SIZE", "1")))
    each_a_machine(int(os.environ.get("RANK", "0")), next(iter(every.values())).socket_nodes)
    from benchmarks.throughput.session import Measured, Session

    world = join_ranks(next(iter(every.values())))
    setup_logging(world.rank)
    command = shlex.join(["torchrun", "...", "-m", "benchmarks.two_nodes", *argv])
    measured: Measured | None = None
    apart: list[str] = []
    try:
        for settings in every.values():
            session = Session(settings, world, command, lambda *_: lambda _: None)
            measured = session.machine(measured)
            apart += session.run(measured)
    finally:
        leave_ranks()
    if apart:
        logger.error("Losses or gradients of these modes differ from the first mode's: %s", "; ".join(apart))
        raise SystemExit(1)


def _compare(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_nodes")
    parser.add_argument("--compare", type=Path, required=True, help="folder that the ranks wrote")
    parser.add_argument("--beside", help="root of another checkout, whose planner's bytes are shown beside")
    parser.add_argument("--table-of", default="", help="GPU whose cost tables stand in for missing ones")
    options = parser.parse_args(argv)
    files = sorted(options.compare.glob("*x*/benchmark.json"), reverse=True)
    if not files:
        raise ConfigError(f"--compare is {options.compare}, which holds no run such as 4x2/benchmark.json.")
    found = {}
    for path in files:
        found[path.parent.name] = compared(json.loads(path.read_text()), options.beside, options.table_of)
        _show(path.parent.name, found[path.parent.name])
    text = json.dumps({"command": shlex.join(["python", "-m", "benchmarks.two_nodes", *argv]), "runs": found}, indent=1)
    (options.compare / "comparison.json").write_text(text + "\n", encoding="utf-8")


def compared(content: dict[str, Any], beside: str | None, table_of: str = "") -> dict[str, Any]:
    """Figures by workload and mode of a report: tokens per second measured and predicted, and bytes that move per
    step."""
    from benchmarks.measured_runs import peers_of, runs_of
    from benchmarks.predict import figures_of
    from distca.simulate import load_rates

    if unknown := peers_of(content):
        logger.warning(
            "The simulator does not know unmodified Megatron-Core: %s left out here. What was measured is in "
            "benchmark.json.",
            f"{unknown[0]} is" if len(unknown) == 1 else f"{', '.join(unknown)} are",
        )
    found: dict[str, Any] = {}
    for run in runs_of("", content, table_of):
        predicted = figures_of(run, run.predicted(load_rates()))
        measured = content["cells"][run.workload]["modes"][run.mode.name]
        row = {
            "tokens_per_s": measured["tokens_per_s"],
            "tokens_per_s_predicted": predicted["tokens_per_s"],
            "idle_share_predicted": predicted["idle_share"],
            "gib_per_step": measured.get("bytes_per_step", math.nan) / 2**30,
            "gib_per_step_predicted": predicted["gib_per_step"],
        }
        if beside and run.mode.disaggregated:
            row["gib_per_step_beside"] = _moved_beside(run, beside)
        found.setdefault(run.workload, {})[run.mode.name] = row
    return found


def _moved_beside(run: Run, root: str) -> float:
    shape = run.job.shape
    lengths = [batch.lengths.tolist() for step in run.batches for batch in step.micro_batches]
    given = {
        "ranks": run.job.data_parallel,
        "heads": [shape.heads, shape.kv_heads, shape.head_dim],
        "nano_batches": run.job.nano_batches,
        "lengths": lengths,
    }
    ran = subprocess.run(
        [sys.executable, "-c", _MOVED],
        input=json.dumps(given),
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(ran.stdout) * run.job.layers / len(run.batches) / 2**30


def _show(name: str, found: dict[str, Any]) -> None:
    for workload, modes in found.items():
        for mode, row in modes.items():
            figures = ", ".join(f"{key} {value:,.3f}" for key, value in row.items() if not math.isnan(value))
            logger.info("%s, %s, %s: %s", name, workload, mode, figures)


if __name__ == "__main__":
    main()
