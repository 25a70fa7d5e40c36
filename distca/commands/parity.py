"""``distca parity``: hold disaggregated training against unmodified megatron-core on this machine."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distca.commands.options import check_least, check_writable, writing
from distca.errors import OptionError
from distca.parity.worlds import OF_EXPERTS, OF_KINDS, USUAL, World

if TYPE_CHECKING:
    from distca.parity.cases import ParityCase

_LONGEST_S = 3600.0
"""Seconds for one world's cases."""


Matrix = Literal["usual", "kinds", "experts"]


def parity(output: str | None = None, max_ranks: int = 4, kinds: bool = False, experts: bool = False) -> None:
    """Compare losses and gradients with unmodified megatron-core's, case by case.

    Without GPUs: over gloo, in float32 the whole training path and in float64 the transformer block, absolute
    agreement. With GPUs: over NCCL in bfloat16, the block's distance from float64 relative to unmodified
    megatron-core's own distance with the same kernel. Ends with exit code 1 if a case is out of its tolerance.

    Args:
        output: JSON file to write the figures to.
        max_ranks: most ranks to start, at least 1; with GPUs no more than there are.
        kinds: without GPUs, the full matrix of models with windows, sinks and other norms and rotations instead, also
            with pipeline stages and nodes. With 8 ranks all kinds of parallelism are there at once.
        experts: without GPUs, models with experts instead, also steps of the optimizer; not together with kinds.
    """
    check_least(1, max_ranks=max_ranks)
    if output is not None:
        check_writable("output", output)
    import torch
    from rich.progress import Progress

    from distca.log import console
    from distca.testing.ranks import run_ranks
    from megatron_patches.versions import check_version

    check_version()
    gpus = torch.cuda.device_count()
    most = min(max_ranks, gpus) if gpus else max_ranks
    if kinds and experts:
        raise OptionError("--kinds and --experts are matrices of their own; give one of them.")
    asked: Matrix = "kinds" if kinds else "experts" if experts else "usual"
    if gpus and asked != "usual":
        raise OptionError(
            f"--{asked} is for CPU ranks, and there are GPUs; hide them with CUDA_VISIBLE_DEVICES= in front."
        )
    every = {"usual": USUAL, "kinds": OF_KINDS, "experts": OF_EXPERTS}[asked]
    worlds = [world for world in every if world.ranks <= most]
    hardware = f"{most} × {torch.cuda.get_device_name()}" if gpus else f"{most} gloo ranks on CPU"
    rows: list[dict[str, Any]] = []
    with Progress(console=console()) as progress:
        task = progress.add_task("comparing", total=len(worlds))
        for world in worlds:
            rows += run_ranks(world.ranks, _run, world, bool(gpus), asked, timeout=_LONGEST_S, gpus=bool(gpus))[0]
            if output is not None:
                with writing("output", output):
                    _write(Path(output), rows, hardware)
            progress.advance(task)
    _show(rows)
    if not _agree(rows):
        sys.exit(1)


def _run(world: World, gpus: bool, asked: Matrix) -> list[dict[str, Any]]:
    """One world's suites; runs on every rank."""
    import torch

    warnings.filterwarnings("ignore")
    if not gpus:
        from megatron_patches.patches.cpu import use_cpu

        use_cpu()
    from distca.parity import suite
    from distca.parity.kinds import matrix
    from distca.parity.variants import by_length

    tp = world.tp
    if gpus:
        device = torch.device("cuda", torch.cuda.current_device())
        cases = suite.all_modes(tp, suite.GPU_LENGTHS) + suite.edge_cases(tp, suite.GPU_EDGES)
        cases += suite.kind_cases(tp, suite.GPU_LENGTHS)
        suites: list[Any] = [("bfloat16 ratio", cases, suite.bfloat16_ratios, suite.BFLOAT16_RATIO)]
    elif asked == "experts":
        device, suites = torch.device("cpu"), _suites_of_experts(world)
    else:
        device = torch.device("cpu")
        cases = matrix(world) if asked == "kinds" else suite.all_modes(tp) + suite.edge_cases(tp) + suite.kind_cases(tp)
        # A block alone has no stages, and is not told the lengths of its documents.
        blocks = [case for case in cases if case.pp == 1 and not by_length(case)]
        suites = [
            ("float32", cases, suite.float32_differences, suite.FLOAT32_TOLERANCE),
            ("float64", blocks, suite.float64_errors, suite.FLOAT64_TOLERANCE),
        ]
    rows = []
    for name, cases, compare, limit in suites:
        for case, figures in zip(cases, compare(cases, device), strict=True):
            row = {"suite": name, "ranks": world.ranks, **_settings(case, asked), **figures}
            rows.append(row | {"worst": _worst(figures), "limit": limit})
    return rows


def _suites_of_experts(world: World) -> list[Any]:
    """Name, cases, comparison and limit of each suite."""
    from distca.parity.expert_steps import step_differences
    from distca.parity.experts import expert_cases, expert_differences
    from distca.parity.suite import FLOAT32_TOLERANCE

    as_given, dealt = (expert_cases(world.tp, world.pp, world.ep, deal=deal) for deal in (False, True))
    turn = OF_EXPERTS.index(world) % 2  # the next world trains with the other optimizer
    steps = [
        (f"steps, {name} optimizer", dealt[start::2], partial(step_differences, distributed=name == "distributed"))
        for name, start in (("distributed", turn), ("plain", 1 - turn))
    ]
    suites = [("float32", as_given + dealt, expert_differences), *steps]
    return [(*each, FLOAT32_TOLERANCE) for each in suites]


def _settings(case: ParityCase, asked: Matrix) -> dict[str, Any]:
    """The case by its fields, without the sizes of its model; of kinds of layers also its documents and options, and of
    experts how these are spread."""
    settings, kinds = asdict(case), asked == "kinds"
    if asked != "experts":
        del settings["ep"], settings["deal"]
    settings["documents"] = case.micro_batches if kinds else [len(lengths) for lengths in case.micro_batches]
    for detail in ("shape", "micro_batches", "changed_document", "seed", "options", "rotary_percent"):
        del settings[detail]
    settings["config"] = {name: _plain(value) for name, value in case.config.items()}
    if kinds:
        options = {each.name: getattr(case.options, each.name) for each in fields(case.options)}
        default = type(case.options)()
        settings["options"] = {name: str(given) for name, given in options.items() if given != getattr(default, name)}
        settings["rotary_percent"] = case.rotary_percent
    return settings


def _plain(value: Any) -> Any:
    """A field's value as JSON has it; a function's name."""
    return getattr(getattr(value, "func", value), "__name__", value)


def _worst(figures: Mapping[str, float]) -> float:
    """The largest; infinite if one is no number."""
    return max(math.inf if math.isnan(each) else each for each in figures.values())


def _agree(rows: Sequence[Mapping[str, Any]]) -> bool:
    return all(row["worst"] <= row["limit"] for row in rows)


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from distca.log import console

    table = Table(title="disaggregated training against unmodified megatron-core", title_justify="left")
    for column in ("suite", "ranks", "TP", "PP", "EP", "cases", "worst", "limit", ""):
        table.add_column(column)
    for key in sorted({_layout(row) for row in rows}):
        same = [row for row in rows if _layout(row) == key]
        worst, limit = max(row["worst"] for row in same), same[0]["limit"]
        verdict = Text("agrees", "green") if _agree(same) else Text("differs", "bold red")
        table.add_row(*map(str, key), str(len(same)), f"{worst:.3g}", f"{limit:g}", verdict)
    console().print(table)


def _layout(row: Mapping[str, Any]) -> tuple[str, int, int, int, int]:
    return row["suite"], row["ranks"], row["tp"], row["pp"], row.get("ep", 1)


def _write(path: Path, rows: list[dict[str, Any]], hardware: str) -> None:
    from distca.versions import command_line, versions, write_report

    report = {"command": command_line("distca"), "hardware": hardware, "versions": versions(), "cases": rows}
    write_report(path, report)
