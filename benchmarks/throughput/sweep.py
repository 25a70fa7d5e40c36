"""One table and one picture over the runs of a sweep.

    python -m benchmarks.throughput.sweep benchmarks/example-3d-parallel/logs --output sweep

Reads every benchmark.json below the given folders; writes table.md and plot.png.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.throughput.table import table

PANELS = {
    "tokens/s": lambda made: made["tokens_per_s"],
    "peak memory of a rank, GiB": lambda made: made["memory_gib"]["max"],
    "idle share": lambda made: made["idle_share"],
    "GiB moved per step": lambda made: made["bytes_per_step"] / 2**30,
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
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in found]
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "table.md").write_text("\n\n".join(map(table, reports)), encoding="utf-8")
    plot(reports, arguments.output / "plot.png")


def plot(reports: list[dict[str, Any]], path: Path) -> None:
    """Throughput, memory, idle share and bytes of every workload and mode."""
    from matplotlib.figure import Figure

    cells = {
        name if len(reports) == 1 else f"{name} ({number})": cell["modes"]
        for number, report in enumerate(reports, 1)
        for name, cell in report["cells"].items()
        if cell["modes"]
    }
    modes = list(dict.fromkeys(mode for made in cells.values() for mode in made))
    if not modes:
        return
    figure = Figure(figsize=(max(8.0, 1.5 + 0.22 * len(modes) * len(cells)), 10), layout="constrained")
    width = 0.85 / len(modes)
    for axes, (label, value) in zip(figure.subplots(len(PANELS), 1, sharex=True), PANELS.items(), strict=True):
        for number, mode in enumerate(modes):
            bars = [(at, value(made[mode])) for at, made in enumerate(cells.values()) if mode in made]
            bars = [(at, height) for at, height in bars if height is not None]
            offsets = [at + (number - (len(modes) - 1) / 2) * width for at, _ in bars]
            axes.bar(offsets, [height for _, height in bars], width, label=mode, color=f"C{number % 10}")
        axes.set_ylabel(label)
    axes.set_xticks(range(len(cells)), list(cells))
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=min(len(modes), 5))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
