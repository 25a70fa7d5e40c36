"""Run the benchmark on the ranks that torchrun or srun started."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

# Shapes differ from step to step, which fragments the allocator's fixed blocks; read when CUDA starts.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

from benchmarks.throughput.joining import join_ranks, leave_ranks
from benchmarks.throughput.settings import Settings, parse
from benchmarks.throughput.unused import CONTEXT, STAGES, refuse_unused
from distca.errors import ConfigError, DistcaError
from distca.log import die, setup_logging
from distca.train.config.names import with_settings
from distca.train.launch.check import read_check
from distca.versions import command_line

logger = logging.getLogger("distca.benchmarks")


def main() -> None:
    """Every rank calls it. A mistake of the user ends in one sentence and exit code 2, losses that differ in 1.

    ``--check WORLD_SIZE``, for CPU ranks ``--check WORLD_SIZE cpu``, in front of the settings only checks them.
    """
    setup_logging(int(os.environ.get("RANK", "0")))
    warnings.filterwarnings("ignore")  # megatron-core's, torch's and the kernels', from every rank
    try:
        if check := read_check(sys.argv[1:]):
            asked_of(check.settings, check.world_size, check.on_cpus)
            return
        settings = asked_of(sys.argv[1:], int(os.environ.get("WORLD_SIZE", "1")))
        if settings.link_channels:
            from benchmarks.throughput.links import limit_links

            limit_links(settings.link_channels)
        if settings.socket_nodes:
            from distca.testing.shared_gpus import each_a_machine

            each_a_machine(int(os.environ.get("RANK", "0")), settings.socket_nodes)
        apart = _run(settings)
    except DistcaError as error:
        die(with_settings(str(error)), error.next_step)
    if apart:
        logger.error("Losses or gradients of these modes differ from the first mode's: %s", "; ".join(apart))
        raise SystemExit(1)


def asked_of(argv: list[str], world_size: int, on_cpus: bool = False) -> Settings:
    refuse_unused(argv[argv.index("--") :] if "--" in argv else [], used=(STAGES, CONTEXT))
    return parse(argv, world_size, on_cpus)


def _run(settings: Settings) -> list[str]:
    world = join_ranks(settings)
    setup_logging(world.rank)
    try:
        from benchmarks.throughput.session import Session

        with _progress(world.rank) as bar:
            session = Session(settings, world, command_line("torchrun ... -m benchmarks.throughput"), bar)
            apart = session.run()
        if session.nothing_ran:
            raise ConfigError(" ".join(["No mode ran, so no file was written.", *session.nothing_ran]))
        return apart
    finally:
        leave_ranks()


class _progress:
    """A bar over the steps of every mode on rank 0's terminal; log lines elsewhere, nothing on other ranks."""

    def __init__(self, rank: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        from distca.log import console

        self._speaks = rank == 0
        self._bar: Progress | None = None
        if self._speaks and console().is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
            self._bar = Progress(*columns, TimeElapsedColumn(), TextColumn("{task.fields[figures]}"), console=console())

    def __enter__(self) -> _progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, name: str, steps: int) -> Callable[[dict[str, Any]], None]:
        """Begin with a mode of ``steps`` steps; what it returns is called after each."""
        if self._bar is None:
            logger.info("%s: %d steps", name, steps)
            return lambda _: None
        bar, task, began = self._bar, self._bar.add_task(name, total=steps, figures=""), time.perf_counter()

        def advance(figures: dict[str, Any]) -> None:
            text = f"loss {figures['loss']:.4f}  tokens/s {figures['tokens_per_s']:,.0f}"
            bar.update(task, advance=1, figures=f"{text}  {time.perf_counter() - began:.0f} s")

        return advance


if __name__ == "__main__":
    main()
