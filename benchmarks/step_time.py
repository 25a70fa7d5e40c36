"""Write where a step's time goes, from kept traces: ``python -m benchmarks.step_time``.

It writes the table of ``benchmarks/results/step_time.md`` and draws ``docs/images/step_time.svg``. Kinds of kernels are
those of one GPU in traced steps; what a step took beyond them, in which it computed nothing, is idle.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = RESULTS / "step_time.md"
PICTURE = ROOT / "docs" / "images" / "step_time.svg"
BEGIN, END = "<!-- where time goes -->", "<!-- until here -->"

_KINDS = ("matrix products", "attention", "other")
_COLOURS = ("#4c72b0", "#dd8452", "#8c8c8c", "#e5e5e5")
_COMMITS = {"before": "DistCA before (d1a4203)", "after": "DistCA after (07c4962)"}
_MODES = {
    "distca": "DistCA",
    "cp2-keep": "context parallelism per document",
    "megatron-te2-p2p": "Megatron-Core with Transformer Engine",
}


@dataclass(frozen=True)
class Step:
    """Mean seconds of traced steps on the first GPU.

    Attributes:
        what: was run.
        where: the GPUs and the mix of documents.
        seconds: of each kind of kernels, and idle.
    """

    what: str
    where: str
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds.values())


def steps() -> Iterator[Step]:
    """All steps with a trace: before and after work on other kernels, and beside other ways to train."""
    report = _read("dense_beside_d1a4203.json")
    for workload, cell in report["cells"].items():
        for key, what in _COMMITS.items():
            started = zip(cell[key]["steps_s"], cell[key]["traced_seconds"], strict=True)
            # The first two batches are traced, once in each of two starts.
            each = [_seconds(ranks[0], all_steps[:2]) for all_steps, ranks in started]
            mean = {kind: sum(one[kind] for one in each) / len(each) for kind in each[0]}
            yield Step(what, _where(report, workload), mean)
    report = _read("throughput_2_gpus_peers_64k.json")
    for workload, cell in report["cells"].items():
        for mode, what in _MODES.items():
            figures = cell["modes"][mode]
            yield Step(what, _where(report, workload), _seconds(figures["traced"][0]["kinds"], figures["steps_s"][:1]))


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def _where(report: dict[str, Any], workload: str) -> str:
    mix = {"pretrain": "Pretrain", "prolong": "ProLong"}[workload.split()[0]]
    return f"{report['hardware'].replace('NVIDIA ', '').replace(' 80GB HBM3', '')}, {mix}"


def _seconds(kinds: dict[str, float], measured: list[float]) -> dict[str, float]:
    """Seconds of a step by kind, of as many traced steps as were measured."""
    step = sum(measured) / len(measured)
    computed = {kind: kinds[kind] / len(measured) for kind in _KINDS}
    return computed | {"idle": max(step - sum(computed.values()), 0.0)}


def table(found: list[Step]) -> str:
    """The table in Markdown: milliseconds, and their share of the step."""
    lines = [
        "| GPUs, mix | what | step, ms | " + " | ".join((*_KINDS, "idle")) + " |",
        "|---" * (len(_KINDS) + 4) + "|",
    ]
    for step in found:
        parts = [f"{1e3 * each:.0f} ({each / step.total:.1%})" for each in step.seconds.values()]
        lines.append(f"| {step.where} | {step.what} | {1e3 * step.total:.0f} | {' | '.join(parts)} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(list(steps()))}\n{END}{rest.partition(END)[2]}"


def draw(found: list[Step]) -> None:
    """Draw a bar for each step, its kinds one after the other."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "step_time"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 4.8), layout="constrained")
    names = [f"{step.what}\n{step.where}" for step in found]
    left = [0.0] * len(found)
    for kind, colour in zip(found[0].seconds, _COLOURS, strict=True):
        widths = [1e3 * step.seconds[kind] for step in found]
        bars = axes.barh(names, widths, left=left, color=colour, label=kind)
        axes.bar_label(bars, [f"{width:.0f}" for width in widths], label_type="center", fontsize=7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("ms of a step on one GPU; less is better")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    draw(list(steps()))


if __name__ == "__main__":
    main()
