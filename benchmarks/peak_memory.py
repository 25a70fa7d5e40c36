"""What a rank's memory holds at the peak of a training step, by the place in the code that asked for it.

    torchrun --standalone --nproc-per-node=1 -m benchmarks.peak_memory --modes packed distca --output peak.json -- \
        --config configs/llama-8b.yaml --model.layers 4 --parallel.tp 1 --data.tokens_per_rank 131072

Trains each mode for a few steps on GPUs, records every allocation of the last one and replays them to the moment when
most bytes were taken. Beside it is what distca/train/memory.py predicts.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from distca.data.corpus import Corpus
from distca.data.mixes import sample_long_context
from distca.data.sampler import Sampler
from distca.data.sources.mix import RandomTokens
from distca.train.config import parse_run_config
from distca.train.memory import predict_memory
from distca.train.settings import RunConfig
from distca.train.setup import build_trainer
from distca.train.step_inputs import make_step_inputs
from distca.train.world import World, join_world, leave_world

_STEPS = 3  # the first ones compile kernels and fill the optimizer's state
_FRAMES = 4
_LIBRARIES = ("/torch/", "/contextlib.py", "/megatron/core/utils.py", "/nvtx/")


def main() -> None:
    """Every rank calls it; rank 0 writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=("packed", "distca"), default=["packed", "distca"])
    parser.add_argument("--output", type=Path, required=True, help="result file")
    own, rest = sys.argv[1:], []
    if "--" in own:
        own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    arguments, config = parser.parse_args(own), parse_run_config(rest)
    world, report = join_world(), {}
    for mode in arguments.modes:
        wanted = replace(config, cad=replace(config.cad, enabled=mode == "distca"))
        report[mode] = _measure(wanted, world)
        gc.collect()
        torch.cuda.empty_cache()
    if world.rank == 0:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        for mode, found in report.items():
            sys.stdout.write(f"{mode}: peak {found['peak_gib']:.2f} GiB, predicted {found['predicted_gib']:.2f}\n")
            for gib, blocks, place in found["at_peak"][:40]:
                sys.stdout.write(f"  {gib:7.3f} GiB in {blocks:4d}  {place}\n")
    leave_world()


def _measure(config: RunConfig, world: World) -> dict[str, Any]:
    from megatron_patches.training_step import run_micro_batches

    rows, vocabulary = config.data.tokens_per_rank, config.model.vocabulary
    trainer = build_trainer(config, world, vocabulary)
    ranks = trainer.planning.ranks
    lengths = sample_long_context("pretrain", 8 * ranks * rows, rows, config.data.seed)
    documents = Corpus(RandomTokens(lengths, vocabulary, config.data.seed), rows).train
    sampler = Sampler(documents.lengths, ranks, rows, 1, config.data.seed, whole=True)
    model, optimizer = cast("Any", trainer.model), cast("Any", trainer.optimizer)
    make = partial(make_step_inputs, trainer.planning, documents, sampler)
    for step in range(_STEPS):
        inputs = make()
        if step == _STEPS - 1:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=1_000_000)
        run_micro_batches(model, inputs.batches)
        optimizer.step()
    peak = torch.cuda.max_memory_allocated()
    events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    return {
        "rows": [int(batch.tokens.shape[1]) for batch in inputs.batches],
        "before_step_gib": before / 2**30,
        "peak_gib": peak / 2**30,
        "predicted_gib": max(stage.total for stage in predict_memory(config, world.size, vocabulary)) / 2**30,
        "at_peak": at_peak(events),
    }


def at_peak(events: list[dict[str, Any]]) -> list[tuple[float, int, str]]:
    """(GiB, blocks, place) of what was allocated since recording began and alive when most was, the largest first.

    Args:
        events: a device's trace in a snapshot of torch's allocator, in order.
    """
    alive: dict[int, int] = {}
    total = most = 0
    peak: list[int] = []
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            alive[event["addr"]] = number
            total += event["size"]
        elif event["action"] == "free_completed" and event["addr"] in alive:
            del alive[event["addr"]]
            total -= event["size"]
        if total > most:
            most, peak = total, list(alive.values())
    sizes: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    for number in peak:
        place = _place(events[number])
        sizes[place] += events[number]["size"]
        blocks[place] += 1
    return [(size / 2**30, blocks[place], place) for place, size in sizes.most_common()]


def _place(event: dict[str, Any]) -> str:
    """The innermost lines outside of torch."""
    frames = [frame for frame in event.get("frames", ()) if not any(part in frame["filename"] for part in _LIBRARIES)]
    return " < ".join(f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}" for frame in frames[:_FRAMES])


if __name__ == "__main__":
    main()
