"""A Markdown table of a run's figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.throughput.cut_short import Figures, batches_of, cut_short, tokens_per_s
from distca.words import count, format_bytes


def table(report: dict[str, Any]) -> str:
    """A Markdown table of every workload."""
    lines = [f"{report['hardware']}; `{report['command']}`", "", links(report), ""]
    if report.get("device") == "cpu":
        lines += ["CPU ranks share cores, so these speeds say nothing: they show that every mode runs.", ""]
    for name, cell in report["cells"].items():
        lines += [f"### {name}: {cell['tokens_per_batch']:,.0f} tokens per batch", ""]
        compared = cell.get("compared", {})
        if cell["modes"]:
            lines += [*_rows(cell["modes"], report["batches"], compared.get("over", {})), ""]
        if "ideal_baseline" in compared:
            lines += [f"DistCA over the best baseline ({compared['ideal_baseline']})"]
            if compared.get("batches", report["batches"]) < report["batches"]:
                lines[-1] += f" in the first {compared['batches']} batches"
            lines[-1] += f": {compared['over_ideal_baseline']:.3f} ×."
            if "variable" in cell["modes"]:
                lines[-1] += " (`variable` does not count as one, because it buys its speed with memory.)"
        if pairs := cell.get("pairs"):
            ratios = ", ".join(f"{each:.3f}" for each in pairs["ratios"])
            lines += [f"In turn with {pairs['baseline']}: {ratios}; median {pairs['median']:.3f} ×."]
        lines += [f"Not run: {why}" for why in cell["not_run"].values()]
        lines += [""]
    return "\n".join(lines)


def links(report: dict[str, Any]) -> str:
    """A sentence with the measured rates between ranks."""
    rates = []
    for name, rate in report["links"].items():
        kind = name.removesuffix("_gb_per_s").replace("_", "-")
        rates.append(f"{kind} {rate:.1f}" if rate >= 10 else f"{kind} {rate:.2f}")
    limit = link_limit(report)
    if report.get("socket_nodes"):
        ranks = int(report["socket_nodes"])
        limit += ", each rank a node over sockets" if ranks == 1 else f", nodes of {ranks} ranks over sockets"
    return f"Links{limit}, GB/s of each rank: {', '.join(rates) or 'none'}."


def link_limit(report: dict[str, Any]) -> str:
    """The effect of --link-channels on links; empty where it is not given."""
    channels = report["link_channels"]
    if channels and report.get("device") == "cpu":
        return f", not limited: --link-channels is {channels}, but only NCCL has channels and CPU ranks use gloo"
    return f", limited to {count(channels, 'channel')}" if channels else ""


def _rows(modes: dict[str, Figures], batches: int, over: dict[str, Any]) -> list[str]:
    """Head and a row per mode; columns that are empty in all rows are left out. ``over`` says by mode how many times as
    fast DistCA's steps are."""
    texts: dict[str, Callable[[Figures], str]] = {
        "tokens/s": lambda made: f"{made['tokens_per_s']:,.0f}",
        "step s (± stdev)": lambda made: f"{made['step_s']['mean']:.3f} ± {made['step_s']['stdev']:.3f}",
        "DistCA over it, median of steps": lambda made: _over(over, modes, made),
        "× packed": lambda made: _over_packed(made, modes.get("packed")),
        "of the ceiling": lambda made: _share(made["share_of_ceiling"]) if "share_of_burst_ceiling" in made else "",
        "of a burst's ceiling": _of_a_burst,
        "MFU": lambda made: _share(made["mfu"]),
        "idle": lambda made: _share(made["idle_share"]),
        "summaries exposed": lambda made: _share(made.get("summaries_exposed")),
        "attention max/mean": _attention,
        "peak GiB max (min)": lambda made: _memory(made["memory_gib"]),
        "moved per step": lambda made: format_bytes(made["bytes_per_step"]),
        "planning ms": lambda made: f"{made['plan_ms']:.1f}",
    }
    columns = {head: [text(made) for made in modes.values()] for head, text in texts.items()}
    names = [", ".join(filter(None, (name, cut_short(made, batches)))) for name, made in modes.items()]
    columns = {"mode": names} | {head: cells for head, cells in columns.items() if any(cells)}
    rows = [list(columns), ["---"] * len(columns), *map(list, zip(*columns.values(), strict=True))]
    return ["| " + " | ".join(row) + " |" for row in rows]


def _over_packed(made: Figures, packed: Figures | None) -> str:
    """Over the batches that both have."""
    if packed is None:
        return ""
    count = min(batches_of(made), batches_of(packed))
    return f"{tokens_per_s(made, count) / tokens_per_s(packed, count):.3f}"


def _over(over: dict[str, Any], modes: dict[str, Figures], made: Figures) -> str:
    name = next(name for name, each in modes.items() if each is made)
    return f"{over[name]['median']:.3f}" if name in over and name != "distca" else ""


def _attention(made: Figures) -> str:
    spread = made["attention_max_over_mean"]
    return "" if spread is None else f"{spread['mean']:.3f}"


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
