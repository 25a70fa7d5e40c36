"""Write README's table of when DistCA pays, from the kept results: ``python -m benchmarks.when_it_pays``.

A row is a mix of documents, with so many tokens for each GPU, in one kind of numbers. It has tokens per second of every
way to train that its file has, and how many times as fast DistCA is: by the median over batches where the file says so,
else by mean speeds.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FILES = ("throughput_2_gpus_peers_64k.json", "linears_2_gpus_128k.json")
"""The newest runs of LLaMA-like layers, of one kind of hardware each."""
BEGIN, END = "<!-- when it pays -->", "<!-- until here -->"

_NUMBERS = {"te": "bf16", "local": "bf16", "none": "bf16", "delayed": "FP8 (delayed)", "current": "FP8 (current)"}
_NUMBERS["blockwise"] = "FP8 (blockwise)"
_WAYS = {
    "packed documents": r"packed",
    "context parallelism per document": r"cp\d+(-keep)?",
    "Megatron-Core with Transformer Engine": r"megatron-te.*",
}

Figures = dict[str, Any]


def runs_of(report: Figures) -> Iterator[tuple[str, str, dict[str, Figures], Figures]]:
    """(workload, numbers, figures by mode, cell) of a file of ``throughput`` or of ``linears``."""
    for name, cell in report["cells"].items():
        if "modes" in cell:
            yield name, _NUMBERS[report.get("fp8", "none")], cell["modes"], cell
            continue
        for kind in next(iter(cell.values())):
            yield name, _NUMBERS[kind], {mode: kinds[kind] for mode, kinds in cell.items() if kind in kinds}, {}


def fastest(modes: dict[str, Figures], way: str) -> str | None:
    """The fastest mode of a way to train; None where the run has none."""
    names = [name for name in modes if re.fullmatch(_WAYS[way], name)]
    return max(names, key=lambda name: modes[name]["tokens_per_s"], default=None)


def tokens_of(report: Figures) -> str:
    """Tokens for each GPU, such as 64K, as the command says."""
    found = re.search(r"--data\.tokens_per_rank (\d+)", report["command"])
    assert found, report["command"]
    return f"{int(found[1]) // 1024}K"


def row_of(modes: dict[str, Figures], cell: Figures) -> list[str]:
    """Cells: tokens/s of each way with DistCA's speed over it behind, and DistCA's own tokens/s."""
    over = cell.get("compared", {}).get("over", {})
    ours, cells = modes["distca"]["tokens_per_s"], []
    for way, names in _WAYS.items():
        name = fastest(modes, way)
        if name is None:
            left_out = any(re.fullmatch(names, each) for each in cell.get("not_run", ()))
            cells.append("cannot hold the longest document" if left_out else "not measured")
            continue
        speed = modes[name]["tokens_per_s"]
        ratio = over[name]["median"] if name in over else ours / speed
        cells.append(f"{speed:,.0f} (**{ratio:.3f}×**)")
    return [*cells, f"{ours:,.0f}"]


def table() -> str:
    """The table in Markdown, with a link to each row's file."""
    head = ["mix, tokens for each GPU, numbers", *(f"{way} (DistCA over it)" for way in _WAYS), "DistCA", "GPUs"]
    lines = [head, ["---"] * len(head)]
    for file in FILES:
        report = json.loads((RESULTS / file).read_text(encoding="utf-8"))
        hardware = re.sub(" ?NVIDIA| 80GB HBM3", "", report["hardware"])
        for workload, numbers, modes, cell in runs_of(report):
            mix = {"pretrain": "Pretrain", "prolong": "ProLong"}[workload.split()[0]]
            link = f"[{hardware}](benchmarks/results/{file})"
            lines.append([f"{mix}, {tokens_of(report)}, {numbers}", *row_of(modes, cell), link])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def with_table(page: str) -> str:
    """The page with the table between its two marks.

    Raises:
        ValueError: the marks are not there.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"The page has no {BEGIN} with {END} behind it.")
    return f"{before}{begin}\n{table()}\n{end}{after}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
