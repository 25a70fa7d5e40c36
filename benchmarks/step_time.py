"""Draw where a step's time goes, from kept traces: ``python -m benchmarks.step_time``.

``python -m benchmarks.tables`` writes the table of ``benchmarks/results/step_time.md``. Kinds of kernels are
those of one GPU in traced steps; what a step took beyond them, in which it computed nothing, is idle.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.tables import MIXES, ROOT, Figures, kept, rows

PICTURE = ROOT / "docs" / "images" / "step_time.svg"

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
    report = kept("dense_beside_d1a4203")
    for workload, cell in report["cells"].items():
        for key, what in _COMMITS.items():
            started = zip(cell[key]["steps_s"], cell[key]["traced_seconds"], strict=True)
            # The first two batches are traced, once in each of two starts.
            each = [_seconds(ranks[0], all_steps[:2]) for all_steps, ranks in started]
            mean = {kind: sum(one[kind] for one in each) / len(each) for kind in each[0]}
            yield Step(what, _where(report, workload), mean)
    report = kept("throughput_2_gpus_peers_64k")
    for workload, cell in report["cells"].items():
        for mode, what in _MODES.items():
            figures = cell["modes"][mode]
            yield Step(what, _where(report, workload), _seconds(figures["traced"][0]["kinds"], figures["steps_s"][:1]))


def _where(report: Figures, workload: str) -> str:
    hardware = report["hardware"].replace("NVIDIA ", "").replace(" 80GB HBM3", "")
    return f"{hardware}, {MIXES[workload.split()[0]]}"


def _seconds(kinds: dict[str, float], measured: list[float]) -> dict[str, float]:
    """Seconds of a step by kind, of as many traced steps as were measured."""
    step = sum(measured) / len(measured)
    computed = {kind: kinds[kind] / len(measured) for kind in _KINDS}
    return computed | {"idle": max(step - sum(computed.values()), 0.0)}


def table() -> str:
    """The table in Markdown: milliseconds, and their share of the step."""
    lines = [["GPUs, mix", "what", "step, ms", *_KINDS, "idle"], ["---"] * (len(_KINDS) + 4)]
    for step in steps():
        parts = [f"{1e3 * each:.0f} ({each / step.total:.1%})" for each in step.seconds.values()]
        lines.append([step.where, step.what, f"{1e3 * step.total:.0f}", *parts])
    return rows(*lines)


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
    draw(list(steps()))


if __name__ == "__main__":
    main()
