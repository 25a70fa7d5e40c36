"""A Markdown table of a run's figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distca.train.progress import format_bytes

Figures = dict[str, Any]


def table(report: dict[str, Any]) -> str:
    """A Markdown table of every workload."""
    lines = [f"{report['hardware']}; `{report['command']}`", "", links(report), ""]
    if report.get("device") == "cpu":
        lines += ["CPU ranks share cores, so these speeds say nothing: they show that every mode runs.", ""]
    for name, cell in report["cells"].items():
        lines += [f"### {name}: {cell['tokens_per_batch']:,.0f} tokens per batch", ""]
        if cell["modes"]:
            lines += [*_rows(cell["modes"]), ""]
        compared = cell.get("compared", {})
        if "ideal_baseline" in compared:
            lines += [f"DistCA over the best baseline ({compared['ideal_baseline']}): "]
            lines[-1] += f"{compared['over_ideal_baseline']:.3f} ×."
            if "variable" in cell["modes"]:
                lines[-1] += " (`variable` does not count as one, because it buys its speed with memory.)"
        lines += [f"Not run: {why}" for why in cell["not_run"].values()]
        lines += [""]
    return "\n".join(lines)


def links(report: dict[str, Any]) -> str:
    """A sentence with the measured rates between ranks."""
    rates = []
    for name, rate in report["links"].items():
        kind = name.removesuffix("_gb_per_s").replace("_", "-")
        rates.append(f"{kind} {rate:.1f}" if rate >= 10 else f"{kind} {rate:.2f}")
    channels = report["link_channels"]
    limit = f", limited to {channels} channel{'s' if channels > 1 else ''}" if channels else ""
    return f"Links{limit}, GB/s of each rank: {', '.join(rates) or 'none'}."


def _rows(modes: dict[str, Figures]) -> list[str]:
    """Head and a row per mode; columns that are empty in all rows are left out."""
    packed = modes.get("packed", {}).get("tokens_per_s")
    texts: dict[str, Callable[[Figures], str]] = {
        "tokens/s": lambda made: f"{made['tokens_per_s']:,.0f}",
        "step s (± stdev)": lambda made: f"{made['step_s']['mean']:.3f} ± {made['step_s']['stdev']:.3f}",
        "× packed": lambda made: f"{made['tokens_per_s'] / packed:.3f}" if packed else "",
        "of the ceiling": lambda made: _share(made["share_of_ceiling"]) if "share_of_burst_ceiling" in made else "",
        "of a burst's ceiling": _of_a_burst,
        "MFU": lambda made: _share(made["mfu"]),
        "idle": lambda made: _share(made["idle_share"]),
        "attention max/mean": lambda made: f"{made['attention_max_over_mean']['mean']:.3f}",
        "peak GiB max (min)": lambda made: _memory(made["memory_gib"]),
        "moved per step": lambda made: format_bytes(made["bytes_per_step"]),
        "planning ms": lambda made: f"{made['plan_ms']:.1f}",
    }
    columns = {head: [text(made) for made in modes.values()] for head, text in texts.items()}
    columns = {"mode": list(modes)} | {head: cells for head, cells in columns.items() if any(cells)}
    rows = [list(columns), ["---"] * len(columns), *map(list, zip(*columns.values(), strict=True))]
    return ["| " + " | ".join(row) + " |" for row in rows]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _of_a_burst(made: Figures) -> str:
    """Reports from before rates were told apart have one share, that of a burst's. On CPUs both are the same."""
    burst = made.get("share_of_burst_ceiling")
    if burst is None:
        return _share(made["share_of_ceiling"])
    return "" if burst == made["share_of_ceiling"] else _share(burst)


def _memory(memory: dict[str, Any] | None) -> str:
    return "" if memory is None else f"{memory['max']:.1f} ({memory['min']:.1f})"
