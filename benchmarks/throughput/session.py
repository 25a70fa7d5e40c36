"""All workloads and modes of a run, one after the other, on one start of the ranks."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.throughput.batches import Batches, check_fits, draw_batches, lengths_of
from benchmarks.throughput.ceiling import Ceiling, measure_ceiling, pair_flops
from benchmarks.throughput.cut_short import Figures
from benchmarks.throughput.described import described
from benchmarks.throughput.links import measure_links
from benchmarks.throughput.merged import read_first_start
from benchmarks.throughput.record import RankRecord
from benchmarks.throughput.report import compare, figures, write
from benchmarks.throughput.settings import Cell, Settings, kinds_of
from benchmarks.throughput.sweep import plot
from benchmarks.throughput.table import links
from distca.attention import AttentionSpec, KernelError, choose_kernel
from distca.attention.self_check import check
from distca.baselines import BaselineError, Mode
from distca.cluster.agreement import first_objection
from distca.cluster.world import World
from distca.errors import ConfigError
from distca.versions import header

if TYPE_CHECKING:
    from benchmarks.baselines import CpGroups

logger = logging.getLogger("distca.benchmarks")

Progress = Callable[[str, int], Callable[[dict[str, Any]], None]]


@dataclass(frozen=True)
class Measured:
    """The rates that the machine can reach.

    Attributes:
        held: at rates that are held.
        burst: at those of a burst.
        report: both, and the links, for the result file.
    """

    held: Ceiling
    burst: Ceiling
    report: dict[str, Any]


class Session:
    """One run.

    Args:
        settings: what is asked for.
        world: this process's place.
        command: for the result file.
        progress: begins a mode of so many steps and returns what is called after each.
    """

    def __init__(self, settings: Settings, world: World, command: str, progress: Progress) -> None:
        self._settings, self._world, self._progress = settings, world, progress
        config = settings.config
        self._ranks = config.parallel.data_parallel(world.size)
        self._shape = config.attention_shape
        self._groups: CpGroups | None = None
        self._report: dict[str, Any] = {
            **header(command, world.size),
            "device": world.device.type,
            **described(settings, world.size),
            "cells": {},
        }
        self._first_start = read_first_start(settings, self._report, world.rank) if settings.peer else None
        if self._first_start:
            self._report = self._first_start

    def run(self, measured: Measured | None = None) -> list[str]:
        """Every workload; returns which modes' losses are apart from the others.

        Args:
            measured: what :meth:`machine` of a session on these ranks with the same linear layers gave; None
                measures anew.
        """
        for why in self._settings.left_out.values():
            logger.info("Left out: %s", why)
        measured = self.machine(measured)
        self._report |= measured.report
        ceilings = measured.held, measured.burst
        for cell, mode in self._order():
            self._run_mode(cell, mode, *ceilings)
        for cell in self._settings.cells if self._settings.pairs else ():
            self._run_pairs(cell, *ceilings)
        if self._world.rank == 0 and not self.nothing_ran:
            plot([self._report], self._settings.output / "plot.png")
            logger.info("Wrote benchmark.json, table.md and plot.png into %s", self._settings.output)
        compared = {name: cell.get("compared", {}) for name, cell in self._report["cells"].items()}
        return [f"{mode} on {name}" for name, figures in compared.items() for mode in figures.get("apart", ())]

    def _order(self) -> list[tuple[Cell, Mode]]:
        """The modes that are run, in turn. On GPUs DistCA comes after all baselines: NVSHMEM's memory stays with a
        process once it was taken, and a baseline beside it could do less than alone."""
        runs = [(cell, mode) for cell in self._settings.cells for mode in self._settings.modes]
        if self._world.device.type != "cuda" or self._settings.slow_links:
            return runs
        return sorted(runs, key=lambda run: run[1].disaggregated)

    def _batches(self, cell: Cell) -> Batches:
        """The same at every call."""
        drawn = draw_batches(
            cell,
            self._settings.warm_up + self._settings.batches,
            ranks=self._ranks,
            tokens_per_rank=self._settings.config.data.tokens_per_rank,
            micro_batches=self._settings.config.train.micro_batches,
            vocabulary=self._settings.config.model.vocabulary,
            seed=self._settings.seed,
        )
        if not self._settings.short_warm_up:
            return drawn
        kept = [batch[:1] if n < self._settings.warm_up else batch for n, batch in enumerate(drawn.global_batches)]
        return replace(drawn, global_batches=tuple(kept))

    def _result_of(self, cell: Cell, batches: Batches, ceiling: Ceiling) -> dict[str, Any]:
        """A workload's part of the report, begun where it is the first mode's."""
        measured = batches.global_batches[self._settings.warm_up :]
        lengths = [lengths_of(batch) for batch in measured]
        begun = {
            "mix": cell.mix,
            "context": cell.context,
            "full_share": cell.full_share,
            "tokens_per_batch": sum(int(each.sum()) for each in lengths) / len(lengths),
            "longest_document": max(int(each.max()) for each in lengths),
            "ceiling_step_s": sum(ceiling.step_seconds(each, self._world.size) for each in lengths) / len(lengths),
            "not_run": dict(self._settings.left_out),
            "modes": {},
        }
        result: dict[str, Any] = self._report["cells"].setdefault(cell.name, begun)
        return result

    def _run_mode(self, cell: Cell, mode: Mode, ceiling: Ceiling, burst: Ceiling) -> None:
        settings, batches = self._settings, self._batches(cell)
        result = self._result_of(cell, batches, ceiling)
        try:
            check_fits(mode, batches, self._ranks, settings.config.data.tokens_per_rank, ceiling.work)
        except BaselineError as error:
            result["not_run"][mode.name] = str(error)
            logger.info("Skipped %s on %s: %s", mode.name, cell.name, error)
            return
        try:
            made = self._measure(cell, mode, batches, ceiling, burst)
        except ConfigError as error:  # on all ranks, before anything is built: it does not fit
            result["not_run"][mode.name] = str(error)
            logger.warning("Left out %s on %s: %s", mode.name, cell.name, error)
            return
        self._report = self._report_with(cell, mode, made)
        logger.info(
            "%s on %s: %s tokens/s, %.1f %% of the ceiling, loss %.4f, %stook %.0f s",
            mode.name,
            cell.name,
            f"{made['tokens_per_s']:,.0f}",
            100 * made["share_of_ceiling"],
            made["losses"][-1],
            f"peak {made['memory_gib']['max']:.1f} GiB, " if made["memory_gib"] else "",
            made["took_s"],
        )
        if self._world.rank == 0:
            write(settings.output, self._report)

    def _run_pairs(self, cell: Cell, ceiling: Ceiling, burst: Ceiling) -> None:
        """The best baseline and DistCA anew, in turn: a slow drift of the machine's clocks meets both alike."""
        result = self._report["cells"].get(cell.name, {})
        best = result.get("compared", {}).get("ideal_baseline")
        modes = {mode.name: mode for mode in self._settings.modes}
        if best is None:
            return
        batches, ratios = self._batches(cell), []
        for number in range(self._settings.pairs):
            theirs, ours = (
                self._measure(cell, modes[each], batches, ceiling, burst, False) for each in (best, "distca")
            )
            ratios.append(ours["tokens_per_s"] / theirs["tokens_per_s"])
            logger.info("distca over %s on %s, pair %d: %.3f", best, cell.name, number + 1, ratios[-1])
            result["pairs"] = {"baseline": best, "ratios": ratios, "median": statistics.median(ratios)}
            if self._world.rank == 0:
                write(self._settings.output, self._report)

    def _measure(
        self, cell: Cell, mode: Mode, batches: Batches, ceiling: Ceiling, burst: Ceiling, write_partly: bool = True
    ) -> Figures:
        """The figures of a complete mode; what there is of them before is only written, or not even that."""
        settings, began = self._settings, time.perf_counter()
        traced = settings.traced if self._world.device.type == "cuda" else 0
        advance = self._progress(f"{cell.name} {mode.name}", settings.warm_up + settings.batches + traced)

        def figures_of(records: list[RankRecord]) -> Figures:
            return figures(records, batches, settings, ceiling, burst) | {"took_s": time.perf_counter() - began}

        def keep(records: list[RankRecord]) -> None:
            if write_partly and self._world.rank == 0:
                write(settings.output, self._report_with(cell, mode, figures_of(records)))

        return figures_of(self._records(mode, cell, batches, ceiling, advance, keep))

    def _records(
        self,
        mode: Mode,
        cell: Cell,
        batches: Batches,
        ceiling: Ceiling,
        advance: Callable[[dict[str, Any]], None],
        keep: Callable[[list[RankRecord]], None],
    ) -> list[RankRecord]:
        """The records of every rank for a mode. Each kind of start imports its own Megatron-Core, changed or as it
        is."""
        settings, world = self._settings, self._world
        if mode.peer:
            from benchmarks.peers.measure import measure_peer

            return measure_peer(mode, settings, cell, world, batches, ceiling.work, advance)
        from benchmarks.throughput.measure import measure_mode

        return measure_mode(mode, settings, cell, world, batches, self._cp_groups, ceiling.work, advance, keep)

    def _report_with(self, cell: Cell, mode: Mode, made: Figures) -> dict[str, Any]:
        """The report with a mode's figures, complete or so far, beside those of the modes before it."""
        result = self._report["cells"][cell.name]
        ran = result["modes"] | {mode.name: made}
        own = [each.name for each in self._settings.modes]
        modes = {
            name: ran[name] for name in dict.fromkeys([*(result["modes"] if mode.peer else ()), *own]) if name in ran
        }
        cells = self._report["cells"] | {cell.name: result | {"modes": modes, "compared": compare(modes)}}
        return self._report | {"cells": cells}

    def _cp_groups(self) -> CpGroups:
        """The context-parallel groups; megatron's data-parallel group is there once a model was built."""
        from megatron.core import parallel_state

        from benchmarks.baselines import CpGroups

        if self._groups is None:
            self._groups = CpGroups(parallel_state.get_data_parallel_group())
        return self._groups

    @property
    def nothing_ran(self) -> list[str]:
        """Why nothing was measured and no file written; empty where some mode ran."""
        cells = self._report["cells"].values()
        if any(cell["modes"] for cell in cells):
            return []
        return list(dict.fromkeys(why for cell in cells for why in cell["not_run"].values()))

    @property
    def report(self) -> dict[str, Any]:
        """The content of benchmark.json."""
        return self._report

    def machine(self, measured: Measured | None = None) -> Measured:
        """The rates that the machine can reach: ``measured`` where it is known, what the first start measured, or
        measured now; every rank calls it together."""
        return measured or self._measured_before() or self.measure_machine()

    def _measured_before(self) -> Measured | None:
        """The rates of the first start, so that all modes have the same ceiling."""
        if self._first_start is None:
            return None
        config, shape = self._settings.config, self._shape
        held, burst = (
            Ceiling.of_report(self._report[name], config.parallel.tp, pair_flops(shape))
            for name in ("ceiling", "burst_ceiling")
        )
        return Measured(held, burst, {name: self._report[name] for name in ("links", "ceiling", "burst_ceiling")})

    def measure_machine(self) -> Measured:
        """Links between ranks, and what their kernels can do; every rank calls it together."""
        config, device = self._settings.config, self._world.device
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        shape = self._shape
        heads = shape.heads, shape.kv_heads, shape.head_dim
        spec = AttentionSpec(*heads, dtype, device, kinds=kinds_of(config), value_dim=shape.value_dim)
        kernel = choose_kernel(config.cad.kernel, spec)
        if any(mode.method == "ring" for mode in self._settings.modes):
            wrong = first_objection(check(kernel, replace(spec, causal=False)).objection)
            if wrong:
                raise KernelError(f"Kernel {kernel.name} cannot run ring attention, as without a causal mask {wrong}.")
        document = max(cell.context for cell in self._settings.cells)
        world = dist.group.WORLD
        assert world is not None
        rates = measure_links(world, device)
        held, burst = measure_ceiling(config, shape, kernel, device, document)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        report = {"links": rates, "ceiling": held.report(), "burst_ceiling": burst.report()}
        logger.info("%s", links(self._report | report))
        return Measured(held, burst, report)
