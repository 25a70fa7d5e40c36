"""A Markdown table of a run's figures."""

from __future__ import annotations

from typing import Any

from distca.train.progress import format_bytes


def table(report: dict[str, Any]) -> str:
    """A Markdown table of every workload."""
    lines = [f"{report['hardware']}; `{report['command']}`", "", _links(report), ""]
    for name, cell in report["cells"].items():
        lines += [f"### {name}: {cell['tokens_per_batch']:,.0f} tokens per batch", ""]
        lines += ["| mode | tokens/s | step s (± stdev) | × packed | of the ceiling (of a burst's) | MFU | idle "]
        lines[-1] += "| attention max/mean | peak GiB max (min) | moved per step | planning ms |"
        lines += ["|---" * 11 + "|"]
        packed = cell["modes"].get("packed", {}).get("tokens_per_s")
        lines += [_row(mode, made, packed) for mode, made in cell["modes"].items()]
        lines += [""]
        compared = cell.get("compared", {})
        if "ideal_baseline" in compared:
            lines += [f"DistCA over the best baseline ({compared['ideal_baseline']}): "]
            lines[-1] += f"{compared['over_ideal_baseline']:.3f} ×."
        lines += [f"Not run: {why}" for why in cell["not_run"].values()]
        lines += [""]
    return "\n".join(lines)


def _links(report: dict[str, Any]) -> str:
    rates = [f"{name.removesuffix('_gb_per_s').replace('_', '-')} {rate:.1f}" for name, rate in report["links"].items()]
    channels = report["link_channels"]
    limit = f", limited to {channels} channels" if channels else ""
    return f"Links{limit}, GB/s of each rank: {', '.join(rates) or 'none'}."


def _of_the_ceiling(made: dict[str, Any]) -> str:
    """Reports from before rates were told apart have one share, that of a burst's."""
    if "share_of_burst_ceiling" not in made:
        return f"({made['share_of_ceiling']:.1%})"
    return f"{made['share_of_ceiling']:.1%} ({made['share_of_burst_ceiling']:.1%})"


def _row(mode: str, made: dict[str, Any], packed: float | None) -> str:
    step, memory = made["step_s"], made["memory_gib"]
    cells = [
        mode,
        f"{made['tokens_per_s']:,.0f}",
        f"{step['mean']:.3f} ± {step['stdev']:.3f}",
        f"{made['tokens_per_s'] / packed:.3f}" if packed else "",
        _of_the_ceiling(made),
        "" if made["mfu"] is None else f"{made['mfu']:.1%}",
        "" if made["idle_share"] is None else f"{made['idle_share']:.1%}",
        f"{made['attention_max_over_mean']['mean']:.3f}",
        f"{memory['max']:.1f} ({memory['min']:.1f})",
        format_bytes(made["bytes_per_step"]),
        f"{made['plan_ms']:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"
