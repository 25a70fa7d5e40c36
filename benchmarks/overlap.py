"""Do transfers cost time? Forward and backward of a model with rows sent, and with only the signals sent.

    torchrun --standalone --nproc_per_node=4 benchmarks/overlap.py --output benchmarks/results/overlap.json

The same batches of planned micro-batches run, on one model, as

    nvshmem      ping and pong, rows by NVSHMEM
    nccl         ping and pong, rows by NCCL
    one stream   the micro-batch in one piece, rows by NVSHMEM: every transfer is waited for
    signal only  ping and pong, all of NVSHMEM's signals, and of every transfer's rows none: the lower bound

in turn, step by step, so that a clock or a temperature that drifts meets all of them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from rich.console import Console
from rich.table import Table

from distca import StepDocuments
from distca.data.mixes import sample_long_context
from distca.log import setup_logging
from distca.train.config.cli import parse_run_config
from distca.train.metrics.plots import write_timeline
from distca.train.run.builder import Trainer, build_trainer
from distca.transport import Transport
from distca.transport.nvshmem.interface import Put
from distca.transport.nvshmem.transport import Landing, OneSidedTransport
from distca.transport.select import choose_transport
from distca.versions import command_line, header, write_report
from megatron_patches.ranks.groups import server_pool_group
from megatron_patches.ranks.world import join_world, leave_world
from megatron_patches.steps.device_batch import Batch
from megatron_patches.steps.step import Taker, make_step
from megatron_patches.training.training_step import summed_loss_step

MODES = ("nvshmem", "nccl", "one stream", "signal only")


class SignalOnly(OneSidedTransport):
    """Another transport's memory and numbering, with every signal and no rows."""

    def __init__(self, transport: OneSidedTransport) -> None:
        self.__dict__.update(transport.__dict__)

    def _puts(self, landing: Landing) -> dict[int, list[Put]]:
        return {peer: [] for peer in super()._puts(landing)}


def main() -> None:
    arguments = _arguments()
    world = join_world()
    setup_logging(world.rank)
    trainer = build_trainer(_config(arguments), world, arguments.vocabulary)
    transports = _transports(trainer)
    cases = [(mix, tokens) for tokens in arguments.tokens for mix in ("pretrain", "prolong")]
    report = {
        **header(command_line(f"torchrun --nproc_per_node={world.size} benchmarks/overlap.py"), world.size),
        "layers": arguments.layers,
        "cases": [_case(trainer, transports, mix, tokens, arguments) for mix, tokens in cases],
    }
    if arguments.timeline:
        _timeline(trainer, transports, arguments)
    if world.rank == 0:
        write_report(arguments.output, report)
        _show(report)
    leave_world()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--timeline", type=Path, help="also write a Perfetto timeline of one nvshmem step")
    parser.add_argument("--config", default="configs/llama-8b-cut.yaml", help="the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192, help="small, so that layers are what is timed")
    parser.add_argument("--tokens", type=int, nargs="+", default=[65_536, 131_072], help="per rank; also the context")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each mode")
    parser.add_argument("--buffer-gb", type=float, default=8.0)
    parser.add_argument("settings", nargs="*", help="further settings of the model, after --")
    return parser.parse_args()


def _config(arguments: argparse.Namespace) -> Any:
    settings = ["--config", arguments.config, "--model.layers", str(arguments.layers)]
    settings += ["--model.vocabulary", str(arguments.vocabulary), "--data.vocabulary", str(arguments.vocabulary)]
    settings += ["--cad.nvshmem_buffer_gb", str(arguments.buffer_gb), *arguments.settings]
    return parse_run_config(settings)


def _transports(trainer: Trainer) -> dict[str, Transport]:
    """One for each mode; where there is no NVSHMEM (a rehearsal on CPUs) all of them are the trainer's."""
    usual = trainer.cad.pool.transport
    if not isinstance(usual, OneSidedTransport):
        return dict.fromkeys(MODES, usual)
    usual.use_fallback(None)  # each mode's rows travel by its own transport or not at all
    nccl = choose_transport("nccl", server_pool_group())
    return {"nvshmem": usual, "nccl": nccl, "one stream": usual, "signal only": SignalOnly(usual)}


def _case(
    trainer: Trainer, transports: dict[str, Transport], mix: str, tokens: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    seconds: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    moved = []
    for step in range(arguments.steps + 1):
        batches = {nano: _batch(trainer, mix, tokens, step, nano) for nano in (1, 2)}
        moved.append(batches[2][1])
        # Another mode goes first each time: the first one also pays for memory of sizes that were not there before.
        for mode in MODES[step % len(MODES) :] + MODES[: step % len(MODES)]:
            batch, _ = batches[1 if mode == "one stream" else 2]
            with _over(trainer, transports[mode]):
                seconds[mode].append(_step(trainer, batch))
    figures: dict[str, Any] = {"mix": mix, "tokens_per_rank": tokens, "mib_moved_per_layer": float(np.mean(moved))}
    for mode, measured in seconds.items():
        forward, backward = (statistics.median(column) for column in zip(*measured[1:], strict=True))
        figures[mode] = {"forward_ms": forward * 1e3, "backward_ms": backward * 1e3}
    floor = figures["signal only"]
    for mode in MODES:
        for direction in ("forward", "backward"):
            figures[mode][f"{direction}_over_signal_only"] = figures[mode][f"{direction}_ms"] / floor[f"{direction}_ms"]
    return figures


def _batch(trainer: Trainer, mix: str, tokens: int, step: int, nano_batches: int) -> tuple[Batch, float]:
    """A planned micro-batch of random tokens, and the MiB that move in a layer's forward."""
    cad = trainer.cad
    lengths = sample_long_context(cast(Any, mix), tokens * cad.options.ranks, tokens, seed=step)
    random = np.random.default_rng(step)
    documents = [[random.integers(0, trainer.vocabulary, length) for length in lengths]]
    options = replace(cad.options, nano_batches=nano_batches)
    made = make_step(StepDocuments(documents), options, Taker(cad.stage, cad.rank, cad.device))
    return made.batches[0], made.balance.bytes_moved / 2**20


@contextmanager
def _over(trainer: Trainer, transport: Transport) -> Iterator[None]:
    """Let the model's block move rows by ``transport``."""
    block = unwrap_model(cast(Any, trainer.model)).decoder
    usual = block.pool
    block.pool = replace(usual, transport=transport)
    yield
    block.pool = usual


def _step(trainer: Trainer, batch: Batch) -> tuple[float, float]:
    """Seconds of forward and of backward, the largest over ranks."""
    clock, model = trainer.cad.pool.timeline.clock, cast(Any, trainer.model)
    dist.barrier()
    with model.no_sync():
        begin = clock.now()
        loss, _ = summed_loss_step(iter((batch,)), model)
        middle = clock.now()
        loss.backward()
    took = torch.tensor([clock.seconds(begin, middle), clock.seconds(middle, clock.now())], device=batch.tokens.device)
    trainer.cad.pool.timeline.serve_seconds()
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took[0]), float(took[1])


def _timeline(trainer: Trainer, transports: dict[str, Transport], arguments: argparse.Namespace) -> None:
    batch, _ = _batch(trainer, "prolong", arguments.tokens[-1], 1, 2)
    timeline, world = trainer.cad.pool.timeline, trainer.world
    with _over(trainer, transports["nvshmem"]):
        timeline.start_recording()
        _step(trainer, batch)
    gathered: list[Any] = [None] * world.size
    dist.gather_object(timeline.take(world.rank), gathered if world.rank == 0 else None)
    if world.rank == 0:
        write_timeline(arguments.timeline, [event for events in gathered for event in events])


def _show(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['hardware']}: milliseconds, and over signal only")
    for column in ("mix", "tokens per rank", "mode", "forward", "backward"):
        table.add_column(column, justify="right")
    for case in report["cases"]:
        for mode in MODES:
            cells = [
                f"{case[mode][f'{direction}_ms']:.1f} ({case[mode][f'{direction}_over_signal_only']:.3f})"
                for direction in ("forward", "backward")
            ]
            table.add_row(case["mix"], f"{case['tokens_per_rank']:,}", mode, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
