"""``distca parity``: hold disaggregated training against unmodified megatron-core on this machine."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distca.commands.options import check_least, check_writable


def parity(output: str | None = None, max_ranks: int = 4) -> None:
    """Compare losses and gradients with unmodified megatron-core's, case by case.

    Without GPUs: over gloo, in float32 the whole training path and in float64 the transformer block, absolute
    agreement. With GPUs: over NCCL in bfloat16, the block's distance from float64 relative to unmodified
    megatron-core's own distance with the same kernel. Ends with exit code 1 if a case is out of its tolerance.

    Args:
        output: JSON file to write the figures to.
        max_ranks: most ranks to start, at least 1; with GPUs no more than there are.
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
    worlds = [(ranks, tp) for ranks, tp in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2)) if ranks <= most]
    rows: list[dict[str, Any]] = []
    with Progress(console=console()) as progress:
        task = progress.add_task("comparing", total=len(worlds))
        for ranks, tp in worlds:
            rows += run_ranks(ranks, _run, ranks, tp, bool(gpus), timeout=900.0, gpus=bool(gpus))[0]
            progress.advance(task)
    _show(rows)
    if output is not None:
        _write(Path(output), rows, f"{most} × {torch.cuda.get_device_name()}" if gpus else f"{most} gloo ranks on CPU")
    if not _agree(rows):
        sys.exit(1)


def _run(ranks: int, tp: int, gpus: bool) -> list[dict[str, Any]]:
    """One world's suites; runs on every rank."""
    import torch

    warnings.filterwarnings("ignore")
    if not gpus:
        from megatron_patches.patches.cpu import use_cpu

        use_cpu()
    from distca.parity import suite

    if gpus:
        device = torch.device("cuda", torch.cuda.current_device())
        cases = suite.all_modes(tp, suite.GPU_LENGTHS) + suite.edge_cases(tp, suite.GPU_EDGES)
        cases += suite.kind_cases(tp, suite.GPU_LENGTHS)
        suites: list[Any] = [("bfloat16 ratio", cases, suite.bfloat16_ratios, suite.BFLOAT16_RATIO)]
    else:
        device = torch.device("cpu")
        cases = suite.all_modes(tp) + suite.edge_cases(tp) + suite.kind_cases(tp)
        suites = [
            ("float32", cases, suite.float32_differences, suite.FLOAT32_TOLERANCE),
            ("float64", cases, suite.float64_errors, suite.FLOAT64_TOLERANCE),
        ]
    rows = []
    for name, cases, compare, limit in suites:
        for case, figures in zip(cases, compare(cases, device), strict=True):
            settings = asdict(case)
            settings["documents"] = [len(lengths) for lengths in case.micro_batches]
            for detail in ("shape", "micro_batches", "changed_document", "seed", "options", "rotary_percent"):
                del settings[detail]
            rows.append(
                {"suite": name, "ranks": ranks, **settings, **figures, "worst": _worst(figures), "limit": limit}
            )
    return rows


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
    for column in ("suite", "ranks", "TP", "cases", "worst", "limit", ""):
        table.add_column(column)
    for key in sorted({(row["suite"], row["ranks"], row["tp"]) for row in rows}):
        same = [row for row in rows if (row["suite"], row["ranks"], row["tp"]) == key]
        worst, limit = max(row["worst"] for row in same), same[0]["limit"]
        verdict = Text("agrees", "green") if _agree(same) else Text("differs", "bold red")
        table.add_row(key[0], str(key[1]), str(key[2]), str(len(same)), f"{worst:.3g}", f"{limit:g}", verdict)
    console().print(table)


def _write(path: Path, rows: list[dict[str, Any]], hardware: str) -> None:
    from distca.versions import versions, write_report

    report = {"command": f"distca parity --output {path}", "hardware": hardware, "versions": versions(), "cases": rows}
    write_report(path, report)
