"""The programme for four and eight GPUs: predicted without GPUs first, then run, part by part.

    python -m benchmarks.many_gpus --gpus 4 --output out --predict              # without GPUs: out/NAME/predicted.json
    python -m benchmarks.many_gpus --gpus 4 --output out --parts dense experts  # on the machine, 10 minutes a part
    python -m benchmarks.many_gpus --gpus 4 --output out --dry-run              # the commands alone

Runs go one after the other, each with a limit of its own. A run that passes its limit is ended; its folder keeps the
modes that were done. Of a run that was predicted, out/NAME/beside.json then has predicted and measured figures.
``--runs`` takes single runs by name, such as those of unmodified Megatron-Core where Transformer Engine has an
environment of its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.run_costs import GPUS
from benchmarks.throughput.__main__ import asked_of
from distca.log import setup_logging

logger = logging.getLogger("distca.benchmarks")

PART_S = 600
"""Seconds that all runs of a part may take together."""
_START_S, _MODE_S = 45.0, 2.0
"""Seconds that a start of the ranks takes until its second step, and that each later mode takes before its first step;
measured on four H200."""
_DENSE = "--config configs/llama-8b.yaml --model.layers 4 --model.vocabulary 32000 --data.tokens_per_rank 131072"
_GEMMA, _HYBRID = (f"--config configs/{name}-cut.yaml" for name in ("gemma-3-like", "qwen3.5-9b-like"))
_WHOLE = "--config configs/llama-8b.yaml --parallel.tp 2 --train.recompute all"
"""Context parallelism would need 159 GiB on 4 GPUs if MLPs alone were recomputed."""
_MLP = "--train.recompute mlp"
_FP8 = "--train.linears te --train.fp8 delayed"
_STEPS = "--batches 6 --warm-up 3 --traced 1"
"""The steps of each mode, where a run names no others behind these."""
_FEWER_STEPS = "--batches 5 --warm-up 2 --traced 0"
_OURS_S, _PEER_S = 330, 200
"""Seconds for all modes of this project in one start, and for one mode of unmodified Megatron-Core."""
_SOCKETS_GB_S = ("7", "9")
"""Rates of each GPU in an all-to-all and an all-gather over sockets, for predictions (benchmarks/results/README.md)."""


@dataclass(frozen=True)
class Run:
    """One start of the ranks.

    Attributes:
        part: the part of the programme that it belongs to.
        name: of the run and its folder.
        seconds: after which it is ended.
        benchmark: the module, such as benchmarks.throughput.
        arguments: of the module, with ``OUT`` for the run's folder.
    """

    part: str
    name: str
    seconds: int
    benchmark: str
    arguments: str

    def words(self, folder: Path) -> list[str]:
        """The module's arguments."""
        return shlex.split(self.arguments.replace("OUT", str(folder)))


def runs_of(gpus: int) -> list[Run]:
    """The programme of a machine with 4 or 8 GPUs."""
    degrees = [degree for degree in (2, 4, 8) if degree <= gpus]
    ours = " ".join(["packed", *(f"cp{degree}-keep" for degree in degrees), "distca"])
    widest = f"cp{gpus}-keep distca"
    half = gpus // 2
    return [
        *_beside_peers("dense", ours, degrees, f"{_DENSE} --parallel.tp 1 {_MLP}"),
        *_beside_peers("fp8", ours, degrees, f"{_DENSE} --parallel.tp 1 {_MLP} {_FP8}"),
        *_beside_peers("long", widest, [gpus], f"{_DENSE} --parallel.tp 1 {_MLP}", "--batches 3 --warm-up 2", 524_288),
        _throughput("tensor", "tensor", f"packed cp{half}-keep distca", f"{_DENSE} --parallel.tp 2 {_MLP}", 200),
        *(_pipeline(stages, gpus) for stages in (2, 4)),
        _throughput(
            "nodes", "nodes", widest, f"{_DENSE} --parallel.tp 1 {_MLP}", 300, f"--socket-nodes {half} --short-warm-up"
        ),
        _throughput(
            "whole", "whole", f"packed cp{half}-keep distca", _WHOLE, 500, "--batches 2 --warm-up 1 --traced 0"
        ),
        *(_experts(ep, gpus) for ep in (gpus, half)),
        _throughput("kinds", "gemma", f"cp{half}-keep cp{half}-halo distca", _GEMMA, 200),
        _throughput("kinds", "hybrid", f"packed cp{half}-keep distca", _HYBRID, 400),
        Run("servers", "servers", 300, "benchmarks.server_kills", _kills(gpus)),
    ]


def _throughput(
    part: str, name: str, modes: str, model: str, seconds: int, how: str = "", contexts: int = 131_072
) -> Run:
    arguments = f"--output OUT --modes {modes} --contexts {contexts} {_STEPS} {how} -- {model}"
    return Run(part, name, seconds, "benchmarks.throughput", arguments)


def _beside_peers(
    part: str, modes: str, degrees: list[int], model: str, how: str = _FEWER_STEPS, contexts: int = 131_072
) -> Iterator[Run]:
    """This project's modes, then each of unmodified Megatron-Core in a start of its own, into one file. Megatron-Core's
    starts are a part of their own: attention plans of cuDNN take it about 100 s."""
    yield _throughput(part, part, modes, model, _OURS_S, how, contexts)
    for degree in degrees:
        name, mode = f"{part}-peer{degree}", f"megatron-te{degree}-p2p"
        run = _throughput(f"{part}-peers", name, mode, model, _PEER_S, how, contexts)
        yield replace(run, arguments=run.arguments.replace("OUT", f"OUT/../{part}"))


def _pipeline(stages: int, gpus: int) -> Run:
    where = f"--output OUT/benchmark.json --ranks {gpus} --pp {stages}"
    steps = "--micro-batches 4 --warm-up 1 --steps 2 --mixes pretrain"
    model = f"--config configs/llama-8b.yaml --parallel.tp 1 --model.layers 8 --model.vocabulary 32000 {_MLP}"
    return Run("pipelines", f"pipeline{stages}", 290, "benchmarks.pipeline", f"{where} {steps} -- {model}")


def _experts(ep: int, gpus: int) -> Run:
    model = f"--config configs/qwen3-30b-a3b-cut.yaml --parallel.ep {ep} --train.recompute none"
    modes = " ".join(f"cp{degree}-keep" for degree in (2, 4, 8) if degree <= gpus)
    return _throughput("experts", f"experts-ep{ep}", f"{modes} distca", model, 200)


def _kills(gpus: int) -> str:
    homes = gpus - max(1, gpus // 4)
    return f"--gpus --homes {homes} --servers {gpus - homes} --sockets --kills 1 --out OUT/server_kills.json"


def main() -> None:
    """Predict, print or run the chosen part of the programme."""
    setup_logging(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=(4, 8), required=True)
    parser.add_argument("--output", type=Path, required=True, help="a folder; each run has one of its name in it")
    parts = list(dict.fromkeys(run.part for run in runs_of(8)))
    parser.add_argument("--parts", nargs="+", choices=parts)
    parser.add_argument("--runs", nargs="+", help="single runs by name")
    parser.add_argument("--gpu", choices=GPUS, default=GPUS[0], help="of which GPU costs are predicted")
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--predict", action="store_true", help="predict, without GPUs")
    does.add_argument("--dry-run", action="store_true", help="print the commands")
    asked = parser.parse_args()
    for run in _chosen(parser, asked):
        folder = asked.output / run.name
        if asked.dry_run:
            sys.stdout.write(f"{run.part}, at most {run.seconds} s: {shlex.join(command(run, folder, asked.gpus))}\n")
        elif asked.predict:
            predict(run, folder, asked.gpus, asked.gpu)
        else:
            execute(run, folder, asked.gpus)


def _chosen(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> list[Run]:
    """The runs of the parts and names that are asked for; a name that none of them has ends the command."""
    runs = [run for run in runs_of(asked.gpus) if not asked.parts or run.part in asked.parts]
    names = [run.name for run in runs]
    for name in asked.runs or ():
        if name not in names:
            parser.error(f"--runs has {name}, and there is no such run; choose among {', '.join(names)}.")
    return [run for run in runs if not asked.runs or run.name in asked.runs]


def command(run: Run, folder: Path, gpus: int) -> list[str]:
    """The command that starts a run on this machine."""
    if run.benchmark == "benchmarks.throughput":
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", "-m"]
    else:
        start = ["-m"]
    return [sys.executable, *start, run.benchmark, *run.words(folder)]


def predict(run: Run, folder: Path, gpus: int, gpu: str) -> None:
    """Write FOLDER/predicted.json, for what the simulator can express."""
    if run.benchmark not in ("benchmarks.throughput", "benchmarks.pipeline") or "peer" in run.name:
        return
    of = ["--of", "pipeline"] if run.benchmark == "benchmarks.pipeline" else []
    stand_in = next(each for each in reversed(GPUS) if each != gpu)
    own = ["--ranks", str(gpus), "--gpu", gpu, "--table-of", stand_in]
    own += ["--links", *_SOCKETS_GB_S] if "--socket-nodes" in run.arguments else []
    target = folder / "predicted.json"
    folder.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    own += ["--output", str(target)]
    _call([sys.executable, "-m", "benchmarks.predict", *own, *of, "--", *run.words(folder)], None)
    if run.benchmark == "benchmarks.throughput" and target.exists():
        needed = seconds_of(json.loads(target.read_text()), run.words(folder), gpus)
        said = logger.info if needed <= run.seconds else logger.warning
        said("%s needs about %.0f s and has %d.", run.name, needed, run.seconds)


def seconds_of(predicted: dict[str, Any], words: list[str], gpus: int) -> float:
    """How long a start with these arguments takes by its predicted steps, in seconds."""
    settings = asked_of(words, gpus)
    modes = [mode for cell in predicted["cells"].values() for mode in cell["modes"].values()]
    steps = settings.warm_up + settings.batches + settings.traced
    return _START_S + sum(_MODE_S + steps * fmean(mode["steps_s"]) for mode in modes)


def execute(run: Run, folder: Path, gpus: int) -> None:
    """Run it within its limit, and join what was predicted with what was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    _call(command(run, folder, gpus), run.seconds)
    predicted, measured = folder / "predicted.json", folder / "benchmark.json"
    if predicted.exists() and measured.exists():
        both = ["--predicted", str(predicted), "--beside", str(measured), "--output", str(folder / "beside.json")]
        _call([sys.executable, "-m", "benchmarks.predict", *both], None)


def _call(words: list[str], seconds: int | None) -> None:
    """A run that fails or is too slow is named, and the others go on."""
    logger.info("%s", shlex.join(words))
    process = subprocess.Popen(words)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        logger.warning("It was ended after %s s.", seconds)
    else:
        if code:
            logger.warning("It failed with exit code %d.", code)


if __name__ == "__main__":
    main()
