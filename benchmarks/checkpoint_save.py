"""How long training stands still for a checkpoint, with and without writing in the background.

    python benchmarks/checkpoint_save.py --output benchmarks/results/checkpoint_save.json -- \\
        --config configs/llama-8b-cut.yaml --model.layers 16 --model.hidden 2048 --model.ffn 8192 --model.heads 32

Two runs of the same steps, one after the other, of which some end with a checkpoint. Everything behind ``--`` are
settings of both. Per run it says how long ordinary steps took, and how long training stood still for each checkpoint.
The first one also takes host memory. Each begins when the one before is written, and that time is left out. It says,
too, how long the steps right after took, when the checkpoint was complete, and its bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from distca.versions import command_line, header, write_report

ROOT = Path(__file__).resolve().parent.parent
MODES = {"waits": "false", "background": "true"}


def main() -> None:
    arguments = _arguments()
    if "RANK" in os.environ:
        _work(arguments)
        return
    command = [sys.executable, "-m", "distca.cluster.torchrun", "--standalone", f"--nproc_per_node={arguments.ranks}"]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "1"} | os.environ
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="distca-saves-", dir=arguments.folder) as folder:
        environment["DISTCA_BENCHMARK_FOLDER"] = folder
        subprocess.run([*command, __file__, *sys.argv[1:]], check=True, env=environment)
    sys.stdout.write(arguments.output.read_text())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--folder", type=Path, help="where checkpoints go; by default the system's temporary folder")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=6, help="steps between checkpoints")
    parser.add_argument("settings", nargs="*", help="settings of pretrain_llama.py, after --")
    return parser.parse_args()


def _work(arguments: argparse.Namespace) -> None:
    from benchmarks.ranks import joined_world

    with joined_world() as world:
        report: dict[str, Any] = {
            **header(command_line("python benchmarks/checkpoint_save.py"), world.size),
            "modes": {},
        }
        for mode in arguments.modes:
            report["modes"][mode] = _train(arguments, world, mode)
            if world.rank == 0:
                write_report(arguments.output, report)


def _train(arguments: argparse.Namespace, world: Any, mode: str) -> dict[str, Any]:
    """One run; rank 0's clock."""
    import torch.distributed as dist

    from distca.train.checkpoint.saver import Saver
    from distca.train.config.cli import parse_run_config
    from distca.train.config.validate import validate
    from distca.train.data.corpus import open_corpus
    from distca.train.run.main import run_on

    settings = {
        "name": mode,
        "output": os.environ["DISTCA_BENCHMARK_FOLDER"],
        "train.steps": arguments.steps,
        "train.validate_every": 0,
        "checkpoint.save_every": arguments.every,
        "checkpoint.save_at_end": "false",
        "checkpoint.background": MODES[mode],
        "checkpoint.keep": 1,
        "log.tensorboard": "false",
    }
    line = [*arguments.settings, *(word for name, value in settings.items() for word in (f"--{name}", str(value)))]
    config = parse_run_config(line)
    validate(config, world.size)
    begun, held, complete = dict[int, float](), dict[int, float](), dict[int, float]()
    sizes: list[int] = []
    save, finish = Saver.save, Saver._complete

    def timed_save(self: Any, number: int, *rest: Any, **named: Any) -> None:
        self.finish()
        begun[number] = time.perf_counter()
        save(self, number, *rest, **named)
        held[number] = time.perf_counter() - begun[number]

    def timed_finish(self: Any, path: Path, number: int, *rest: Any) -> None:
        finish(self, path, number, *rest)
        complete[number] = time.perf_counter()
        sizes.append(sum(file.stat().st_size for file in path.iterdir()) if world.rank == 0 else 0)

    Saver.save, Saver._complete = timed_save, timed_finish  # type: ignore[method-assign,assignment]
    try:
        run = run_on(world, config, open_corpus(config)).path
    finally:
        Saver.save, Saver._complete = save, finish  # type: ignore[method-assign]
    torch.cuda.empty_cache()
    dist.barrier()
    took = {line["step"]: line["step_s"] for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
    after = [number for number in took if number - 1 in held]
    ordinary = [seconds for number, seconds in took.items() if number > 2 and number not in after]
    usual = statistics.median(ordinary)
    return {
        "step_s": usual,
        "step_after_a_save_s": [took[number] for number in after],
        "held_s": list(held.values()),
        "step_after_and_held_over_step": [(took[number] + held[number - 1]) / usual for number in after],
        "until_complete_s": [complete[number] - begun[number] for number in held],
        "checkpoint_bytes": sizes,
        "losses": [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()],
    }


if __name__ == "__main__":
    main()
