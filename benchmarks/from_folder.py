"""A model as it is downloaded: a Hugging Face folder is trained, exported and read again; then its shape's throughput.

    torchrun --nproc-per-node 2 -m benchmarks.from_folder --output FOLDER --shape llama-1b
    torchrun --nproc-per-node 2 -m benchmarks.from_folder --output FOLDER --shape qwen3 --steps 5 --kinds te

The folder is made up: config.json of the shape and random weights, as safetensors in a temporary folder. The trainer
begins with it (checkpoint.init_from), trains, validates on one batch and exports; a second run only evaluates the
export, on the same batch. Then the modes of ``benchmarks.throughput`` train the same shape, with each kind of linear
layers as in ``benchmarks.linears``. FOLDER/from_folder.json is written after every part, so that a time limit leaves
what there is.
Settings of pretrain_llama.py follow ``--`` and hold for all parts.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

# As benchmarks.throughput; read when CUDA starts.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

from benchmarks.linears import KINDS, compare_kinds
from benchmarks.throughput.settings import parse
from distca.errors import DistcaError
from distca.log import die, setup_logging
from distca.models.description import ModelDescription
from distca.models.exported_config import config_fields
from distca.models.folder import ExportedModel, ShardWriter, count_shards, finish
from distca.models.layout import expected_shapes
from distca.models.rope import RopeScaling
from distca.train.config.names import with_settings
from distca.versions import command_line, header, write_report

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_patches.ranks.world import World

logger = logging.getLogger("distca.benchmarks")

_LLAMA = {"family": "llama", "norm_epsilon": 1e-5, "tie_embeddings": True, "qkv_bias": False, "qk_norm": False}
_QWEN3 = {"family": "qwen3", "norm_epsilon": 1e-6, "tie_embeddings": True, "qkv_bias": False, "qk_norm": True}
_LLAMA3 = RopeScaling(kind="llama3", factor=32.0, original_length=8192)
_LARGE, _SMALL = {"hidden": 2048}, {"hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "vocabulary": 258, "layers": 2}
# Fields of ModelDescription. llama-1b is LLaMA-3.2-1B's; qwen3 has few layers of Qwen3-1.7B.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": _LLAMA
    | _LARGE
    | {"layers": 16, "ffn": 8192, "heads": 32, "kv_heads": 8, "head_dim": 64, "vocabulary": 128_256}
    | {"rope_base": 500_000.0, "rope_scaling": _LLAMA3, "positions": 131_072},
    "qwen3": _QWEN3
    | _LARGE
    | {"layers": 4, "ffn": 6144, "heads": 16, "kv_heads": 8, "head_dim": 128, "vocabulary": 151_936}
    | {"rope_base": 1e6, "rope_scaling": RopeScaling(original_length=40_960), "positions": 40_960},
    "tiny-llama": _LLAMA
    | _SMALL
    | {"head_dim": 16, "rope_base": 500_000.0, "positions": 4096}
    | {"rope_scaling": replace(_LLAMA3, original_length=64)},
    "tiny-qwen3": _QWEN3
    | _SMALL
    | {"head_dim": 32, "rope_base": 1e6, "rope_scaling": RopeScaling(original_length=512), "positions": 512},
}
_NORM, _SPREAD = "norm.weight", 0.02
_NOT_TIMED = 2  # steps of the training run, which compile and warm up


def main() -> None:
    """Every rank calls it. A mistake of the user ends in one sentence and exit code 2."""
    arguments = _arguments()
    setup_logging(int(os.environ.get("RANK", "0")))
    warnings.filterwarnings("ignore")  # megatron-core's, torch's and the kernels', from every rank
    try:
        _run(arguments)
    except DistcaError as error:
        die(with_settings(str(error)), error.next_step)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for from_folder.json and what the modes write"
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--steps", type=int, default=20, help="of the training run; 0 leaves it out")
    parser.add_argument("--tokens", type=int, default=131_072, help="per rank, and of the longest document")
    parser.add_argument("--mix", default="prolong", choices=("pretrain", "prolong"))
    parser.add_argument("--modes", nargs="*", default=["packed", "cp2-keep", "distca"], help="none leave them out")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["te", "current"], help="of linear layers")
    parser.add_argument("--batches", type=int, default=2, help="measured global batches of a mode")
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("settings", nargs="*", help="settings of pretrain_llama.py, after --")
    return parser.parse_args()


def _run(asked: argparse.Namespace) -> None:
    from megatron_patches.ranks.world import join_world, leave_world

    world = join_world()
    setup_logging(world.rank)
    report: dict[str, Any] = {
        **header(command_line("torchrun ... -m benchmarks.from_folder"), world.size),
        "shape": asked.shape,
        "seconds": {},
    }

    def keep(part: str, found: dict[str, Any], began: float) -> None:
        report["seconds"][part] = round(time.perf_counter() - began, 1)
        report[part] = found
        if world.rank == 0:
            logger.info("%s took %.1f s", part, report["seconds"][part])
            asked.output.mkdir(parents=True, exist_ok=True)
            write_report(asked.output / "from_folder.json", report)

    try:
        with shared_folder(world) as folder:
            began = time.perf_counter()
            keep("made", make_folder(folder / "model", asked.shape, world), began)
            if asked.steps:
                began = time.perf_counter()
                keep("trained", _train(asked, folder, world), began)
                began = time.perf_counter()
                keep("read_again", _read_again(asked, folder, world, report["trained"]["validation_loss"]), began)
            if asked.modes:
                began = time.perf_counter()
                keep("modes", _modes(asked, folder, world, report["command"]), began)
    finally:
        leave_world()


@contextmanager
def shared_folder(world: World) -> Iterator[Path]:
    """A temporary folder of all ranks; there is one node."""
    import torch.distributed as dist

    name = [tempfile.mkdtemp(prefix="distca-folder-") if world.rank == 0 else ""]
    dist.broadcast_object_list(name)
    try:
        yield Path(name[0])
        dist.barrier()
    finally:
        if world.rank == 0:
            shutil.rmtree(name[0], ignore_errors=True)


def make_folder(folder: Path, shape: str, world: World) -> dict[str, Any]:
    """Write a shape's folder with random weights, in bfloat16 on GPUs, else in float32; every rank calls it."""
    import torch
    import torch.distributed as dist

    model = ModelDescription(**SHAPES[shape])
    dtype = "bfloat16" if world.device.type == "cuda" else "float32"
    described, shapes = ExportedModel(model, config_fields(model, dtype, {}), dtype), expected_shapes(model)
    if world.rank == 0:
        generator = torch.Generator(world.device).manual_seed(1)
        writer = ShardWriter(folder, 1, count_shards(described, shapes))
        for name, size in shapes.items():
            drawn = torch.randn(size, generator=generator, device=world.device)
            tensor = torch.ones_like(drawn) if name.endswith(_NORM) else _SPREAD * drawn
            writer.add(name, tensor.to(getattr(torch, dtype)).cpu())
        writer.flush()
        finish(folder, writer.file_of, described)
    dist.barrier()
    return {"config": described.fields, "bytes": sum(file.stat().st_size for file in folder.iterdir())}


def _settings(asked: argparse.Namespace, folder: Path, world: World) -> list[str]:
    """Arguments of all parts: the folder at ``folder``, and the data."""
    settings = {
        "checkpoint.init_from": folder,
        "train.precision": "bf16" if world.device.type == "cuda" else "fp32",
        "data.tokens_per_rank": asked.tokens,
        "data.context_length": asked.tokens,
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))] + asked.settings


def _train_settings(asked: argparse.Namespace, folder: Path, world: World, **own: Any) -> list[str]:
    settings = {
        "output": folder.parent / "runs",
        "data.source": "mix",
        "data.path": f"{asked.mix}-long",
        "data.validation_fraction": 0.2,
        "optimizer.lr": 1e-4,
        "optimizer.min_lr": 1e-5,
        "train.steps": max(asked.steps, 1),
        "train.validate_batches": 1,
        "checkpoint.save_at_end": "false",
        "log.tensorboard": "false",
    } | {name.replace("__", "."): value for name, value in own.items()}
    kind = KINDS[asked.kinds[0]]
    line = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [*line, *kind, *_settings(asked, folder, world)]


def _train(asked: argparse.Namespace, folder: Path, world: World) -> dict[str, Any]:
    """The first kind's training run, and its validation loss with the last weights."""
    from distca.train.metrics.writer import read_metrics

    line = _train_settings(asked, folder / "model", world, checkpoint__export=folder / "export")
    run, losses = _run_trainer(line, world)
    steps = read_metrics(run)
    timed = steps[_NOT_TIMED:] or steps
    seconds = sum(each["step_s"] for each in timed)
    peaks = [each["peak_memory_gb"] for each in steps if "peak_memory_gb" in each]
    mfus = [each["mfu"] for each in timed if each.get("mfu") is not None]
    return {
        "kind": asked.kinds[0],
        "steps": len(steps),
        "timed_steps": len(timed),
        "tokens_per_step": statistics.fmean(each["tokens"] for each in timed),
        "tokens_per_s": sum(each["tokens"] for each in timed) / seconds,
        "mfu": statistics.fmean(mfus) if mfus else None,
        "peak_gib": max(peaks, default=None),
        "losses": [each["loss"] for each in steps],
        "steps_s": [each["step_s"] for each in steps],
        "imbalance_before": statistics.fmean(each["imbalance_before"] for each in timed),
        "imbalance_measured": statistics.fmean(each["imbalance_measured"] for each in timed),
        "validation_loss": losses[-1],
    }


def _read_again(asked: argparse.Namespace, folder: Path, world: World, trained: float) -> dict[str, Any]:
    """The export's loss on the batch that the training run validated on."""
    line = _train_settings(asked, folder / "export", world, train__evaluate="true", name="read-again")
    _, losses = _run_trainer(line, world)
    size = sum(file.stat().st_size for file in (folder / "export").iterdir())
    return {"bytes": size, "validation_loss": losses[-1], "relative_difference": abs(losses[-1] / trained - 1)}


def _run_trainer(line: list[str], world: World) -> tuple[Path, list[float]]:
    """A run's folder and its validation losses; every rank calls it."""
    from unittest.mock import patch

    from benchmarks.throughput.measure import give_back
    from distca.train.config.cli import parse_run_config
    from distca.train.config.validate import validate
    from distca.train.data.corpus import open_corpus
    from distca.train.run import loop
    from distca.train.run.main import run_on

    config = parse_run_config(line)
    validate(config, world.size, config.model.vocabulary)
    losses: list[float] = []
    original = loop._Loop.validate

    def noted(self: Any) -> float | None:
        loss = original(self)
        losses.extend([] if loss is None else [loss])
        return loss

    with patch.object(loop._Loop, "validate", noted):
        path = run_on(world, config, open_corpus(config)).path
    give_back(world)
    return path, losses


def _modes(asked: argparse.Namespace, folder: Path, world: World, command: str) -> dict[str, Any]:
    """Tokens/s, MFU and memory of every mode and kind, on the same batches."""
    own = ["--output", str(asked.output), "--modes", *asked.modes, "--mixes", asked.mix]
    own += ["--contexts", str(asked.tokens), "--batches", str(asked.batches), "--warm-up", str(asked.warm_up)]
    argv = [*own, "--traced", "0", "--", *_settings(asked, folder / "model", world)]
    every = {kind: parse([*argv, *KINDS[kind]], world.size) for kind in asked.kinds}
    found: list[dict[str, Any]] = list(compare_kinds(every, world, command).values())
    return found[0]


if __name__ == "__main__":
    main()
