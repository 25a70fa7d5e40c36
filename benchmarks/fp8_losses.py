"""Does training in FP8 learn as well as in bfloat16, and disaggregated as well as packed? Runs on real text.

    torchrun --nproc-per-node 2 -m benchmarks.fp8_losses --output fp8_losses.json -- --train.steps 200

All runs start from the weights of one run in bfloat16, past the first steps, in which any two roundings part. Those of
a layout train on the same batches: Transformer Engine's linear layers in bfloat16 and in each way to scale to FP8, on
packed documents and disaggregated. Settings behind ``--`` are those of all runs, and win over a layout's. The text is
the Python standard library's, as bytes. Where there are fewer GPUs than ranks, ranks share them; TP 2 is slow then, and
``--train.micro_batches 1`` helps.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

from benchmarks.from_folder import shared_folder
from distca.log import setup_logging
from distca.versions import command_line, header, write_report

if TYPE_CHECKING:
    from megatron_patches.ranks.world import World

logger = logging.getLogger("distca.benchmarks")

LAST = 20
"""Steps at the end whose losses are averaged."""
SETTINGS = {
    "model.layers": 4,
    "model.hidden": 2048,
    "model.ffn": 8192,
    "model.heads": 16,
    "model.kv_heads": 4,
    "data.context_length": 16384,
    "data.tokens_per_rank": 16384,
    "data.longer": "split",
    "data.whole_documents": "true",  # or packed documents would be other batches
    "data.validation_fraction": 0,
    "optimizer.lr": 1e-4,
    "optimizer.min_lr": 1e-5,
    "train.steps": 200,
    "train.micro_batches": 2,
    "train.validate_every": 0,
    "checkpoint.save_at_end": "false",
    "log.tensorboard": "false",
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP 2": {},
    "TP 2": {"parallel.tp": 2, "train.micro_batches": 4},
    "PP 2": {"parallel.pp": 2, "train.micro_batches": 4},
    "DP 2, recompute all": {"train.recompute": "all"},
}
RECIPES = ("none", "current", "delayed", "blockwise")
MODES = ("packed", "distca")


def main() -> None:
    """Every rank calls it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="none is bfloat16")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--before", type=int, default=300, help="steps of the run whose weights all others start from")
    parser.add_argument("settings", nargs="*", help="settings of pretrain_llama.py, after --")
    arguments = parser.parse_args()
    setup_logging(int(os.environ.get("RANK", "0")))
    warnings.filterwarnings("ignore")
    from megatron_patches.ranks.world import join_world, leave_world

    shared_by = _share_gpus()
    world = join_world()
    setup_logging(world.rank)
    report: dict[str, Any] = {
        **header(command_line("torchrun ... -m benchmarks.fp8_losses"), world.size // shared_by),
        "ranks_per_gpu": shared_by,
        "layouts": {},
    }
    words = iter(arguments.settings)
    more = {name.removeprefix("--"): value for name, value in zip(words, words, strict=True)}
    with shared_folder(world) as folder:
        start = folder / "weights"
        begin = {"train.steps": arguments.before, "checkpoint.export": start, "cad.enabled": "false"}
        report["before"] = _train(world, folder, begin, more)
        for layout in arguments.layouts:
            losses: dict[str, list[float]] = {}
            for fp8 in arguments.recipes:
                for mode in arguments.modes:
                    own = _settings(fp8, mode) | {"checkpoint.init_from": start}
                    losses[f"{fp8} {mode}"] = _train(world, folder, own, LAYOUTS[layout] | more)
                    report["layouts"][layout] = compare(losses)
                    if world.rank == 0:  # after each, so that a time limit leaves the others
                        write_report(arguments.output, report)
    leave_world()


def _share_gpus() -> int:
    """Ranks of this machine that share a GPU: losses are the same."""
    import torch

    from distca.testing.shared_gpus import share_gpus

    if not torch.cuda.is_available():
        return 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    os.environ["LOCAL_RANK"] = str(share_gpus(int(os.environ.get("LOCAL_RANK", "0")), ranks))
    return -(-ranks // torch.cuda.device_count())


def _settings(fp8: str, mode: str) -> dict[str, Any]:
    """The settings that set a run apart from others of its layout."""
    if mode == "distca":
        return {"train.fp8": fp8}
    return {"train.fp8": fp8, "cad.enabled": "false"}


def _train(world: World, folder: Path, own: dict[str, Any], more: dict[str, Any]) -> list[float]:
    """Losses of all steps of one run, on rank 0; nothing elsewhere."""
    from distca.train.config.cli import parse_run_config
    from distca.train.config.validate import validate
    from distca.train.data.corpus import open_corpus
    from distca.train.run.main import run_on

    logger.info("%s", own)
    precision = "bf16" if world.device.type == "cuda" else "fp32"
    given = SETTINGS | {"train.precision": precision, "output": folder / "runs"} | more | own
    if "checkpoint.init_from" in own:
        given = {name: value for name, value in given.items() if not name.startswith("model.")}  # the folder knows
        given["data.tokenizer"] = "bytes"
    config = parse_run_config([word for name, value in given.items() for word in (f"--{name}", str(value))])
    validate(config, world.size)
    run = run_on(world, config, open_corpus(config)).path
    if world.rank > 0:
        return []
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def compare(losses: dict[str, list[float]]) -> dict[str, Any]:
    """The losses of a layout's runs, and the mean of the last ones. With it are its distances from bfloat16's in the
    same mode and from packed documents in the same recipe. Distances are relative, with their sign.

    Args:
        losses: of every step, by recipe and mode.
    """
    last = {name: statistics.fmean(run[-LAST:]) for name, run in losses.items() if run}
    result: dict[str, Any] = {}
    for name, mean in last.items():
        fp8, mode = name.split()
        plain, packed = last.get(f"none {mode}"), last.get(f"{fp8} packed")
        result[name] = {
            "last_losses": mean,
            "over_bfloat16": mean / plain - 1 if plain else None,
            "over_packed": mean / packed - 1 if packed else None,
            "losses": losses[name],
        }
    return result


if __name__ == "__main__":
    main()
