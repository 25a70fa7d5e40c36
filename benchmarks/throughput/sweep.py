"""One table and one picture over the runs of a sweep.

    python -m benchmarks.throughput.sweep benchmarks/example-3d-parallel/logs --output sweep

Reads every benchmark.json below the given folders; writes table.md and plot.png.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.throughput.cut_short import Figures, cut_short
from benchmarks.throughput.table import link_limit, table

# By label: the figure of a mode, None where it is not known, and how the axis writes it.
PANELS: dict[str, tuple[Callable[[dict[str, Any]], float | None], str]] = {
    "tokens/s": (lambda made: made["tokens_per_s"], "{x:,.0f}"),
    "peak memory of a rank, GiB": (lambda made: made["memory_gib"] and made["memory_gib"]["max"], "{x:,g}"),
    "idle share": (lambda made: made["idle_share"], "{x:.1%}"),
    "GiB moved per step": (lambda made: made["bytes_per_step"] / 2**30, "{x:,g}"),
}


def main() -> None:
    """Read, join, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder for table.md and plot.png")
    arguments = parser.parse_args()
    found = sorted(path for folder in arguments.folders for path in folder.rglob("benchmark.json"))
    if not found:
        parser.error(f"there is no benchmark.json below {', '.join(map(str, arguments.folders))}")
    reports = [report for path in found if (report := _read(path)) is not None]
    if not reports:
        parser.error("no benchmark.json could be read")
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "table.md").write_text("\n\n".join(map(table, reports)), encoding="utf-8")
    plot(reports, arguments.output / "plot.png")


def _read(path: Path) -> dict[str, Any] | None:
    """The report in a file; None, and a warning, where it has none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        report = error
    if isinstance(report, dict) and "cells" in report:
        return report
    why = f" ({report})" if isinstance(report, Exception) else ""
    sys.stderr.write(f"warning: {path} is no report of the benchmark and is left out{why}.\n")
    return None


def plot(reports: list[dict[str, Any]], path: Path) -> None:
    """Throughput, memory, idle share and bytes of every workload and mode; what no mode knows is left out."""
    from matplotlib.figure import Figure

    cells = {
        _label(name if len(reports) == 1 else f"{name} ({number})", cell["modes"], report["batches"]): cell["modes"]
        for number, report in enumerate(reports, 1)
        for name, cell in report["cells"].items()
        if cell["modes"]
    }
    modes = list(dict.fromkeys(mode for made in cells.values() for mode in made))
    panels = {
        label: (value, text)
        for label, (value, text) in PANELS.items()
        if any(value(figures) is not None for made in cells.values() for figures in made.values())
    }
    if not modes:
        return
    figure = Figure(figsize=(max(8.0, 1.5 + 0.22 * len(modes) * len(cells)), 1 + 2.3 * len(panels)))
    figure.set_layout_engine("constrained")
    figure.suptitle(title(reports), fontsize="small")
    width = 0.85 / len(modes)
    for axes, (label, (value, text)) in zip(figure.subplots(len(panels), 1, sharex=True), panels.items(), strict=True):
        for number, mode in enumerate(modes):
            bars = [(at, value(made[mode])) for at, made in enumerate(cells.values()) if mode in made]
            bars = [(at, height) for at, height in bars if height is not None]
            offsets = [at + (number - (len(modes) - 1) / 2) * width for at, _ in bars]
            axes.bar(offsets, [height for _, height in bars], width, label=mode, color=f"C{number % 10}")
        axes.set_ylabel(label)
        axes.yaxis.set_major_formatter(text)
    axes.set_xticks(range(len(cells)), list(cells))
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(len(modes), 5))
    figure.savefig(path, dpi=110)


def _label(name: str, modes: dict[str, Figures], batches: int) -> str:
    """A workload's name, and below it the modes whose bars are over fewer batches than the others'."""
    short = {mode: cut_short(made, batches) for mode, made in modes.items()}
    return "\n".join([name, *(f"{mode}: {text}" for mode, text in short.items() if text)])


def title(reports: list[dict[str, Any]]) -> str:
    """The machine that figures were measured on; several answers with the numbers of their runs."""
    runs: dict[str, list[str]] = {}
    for number, report in enumerate(reports, 1):
        model, parallel = report["model"], report["parallel"]
        layers = "1 layer" if model["layers"] == 1 else f"{model['layers']} layers"
        text = f"{report['hardware']}, {report['tokens_per_rank']:,} tokens per rank, "
        text += f"TP {parallel['tp']}, PP {parallel['pp']}\n{layers}, hidden {model['hidden']:,}, "
        text += f"{model['heads']}/{model['kv_heads']} heads, vocabulary {model['vocabulary']:,}"
        if limit := link_limit(report):
            text += f", links{limit.removeprefix(',')}"
        runs.setdefault(text, []).append(str(number))
    if len(runs) == 1:
        return next(iter(runs))
    return "\n".join(f"({', '.join(numbers)}) {text}" for text, numbers in runs.items())


if __name__ == "__main__":
    main()
