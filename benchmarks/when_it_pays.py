"""README's table of when DistCA pays, from the kept results: ``python -m benchmarks.tables`` writes it.

A row is a mix of documents, with so many tokens for each GPU, in one kind of numbers. It has tokens per second of every
way to train that its file has, and how many times as fast DistCA is: by the median over batches where the file says so,
else by mean speeds. Of several ways of a kind the one that DistCA is least ahead of counts. What the file lacks is
taken from an earlier file with such a row of as many GPUs, with DistCA's speed of that run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.tables import MIXES, Figures, kept, rows

FILES = (
    "baselines_2_gpus_64k",
    "throughput_2_gpus_peers_64k",
    "throughput_2_gpus_peers_128k",
    "baselines_4_gpus_128k",
    "baselines_2_gpus_64k_fp8",
)
"""The newest runs of LLaMA-like layers, of one kind of hardware each. Earlier ones are last."""
_LACKS = "not measured"

_NUMBERS = {"te": "bf16", "local": "bf16", "none": "bf16", "delayed": "FP8 (delayed)", "current": "FP8 (current)"}
_NUMBERS["blockwise"] = "FP8 (blockwise)"
_WAYS = {
    "packed documents": r"packed",
    "context parallelism per document": r"cp\d+(-keep)?",
    "Megatron-Core with Transformer Engine": r"megatron-te.*",
}


def runs_of(report: Figures) -> Iterator[tuple[str, str, dict[str, Figures], Figures]]:
    """(workload, numbers, figures by mode, cell) of a file of ``throughput`` or of ``linears``."""
    for name, cell in report["cells"].items():
        if "modes" in cell:
            yield name, _NUMBERS[report.get("fp8", "none")], cell["modes"], cell
            continue
        for kind in next(iter(cell.values())):
            yield name, _NUMBERS[kind], {mode: kinds[kind] for mode, kinds in cell.items() if kind in kinds}, {}


def ahead_of(modes: dict[str, Figures], cell: Figures, mode: str) -> float:
    """How many times as fast as a mode DistCA is."""
    over = cell.get("compared", {}).get("over", {})
    if mode in over:
        return float(over[mode]["median"])
    return float(modes["distca"]["tokens_per_s"] / modes[mode]["tokens_per_s"])


def tokens_of(report: Figures) -> str:
    """Tokens for each GPU, such as 64K, as the command says."""
    found = re.search(r"--data\.tokens_per_rank (\d+)", report["command"])
    assert found, report["command"]
    return f"{int(found[1]) // 1024}K"


def row_of(modes: dict[str, Figures], cell: Figures) -> list[str]:
    """Cells: tokens/s of each way with DistCA's speed over it behind, and DistCA's own tokens/s."""
    cells = []
    for names in _WAYS.values():
        ran = [name for name in modes if re.fullmatch(names, name)]
        if not ran:
            left_out = any(re.fullmatch(names, each) for each in cell.get("not_run", ()))
            cells.append("cannot hold the longest document" if left_out else _LACKS)
            continue
        best = min(ran, key=lambda name: ahead_of(modes, cell, name))
        cells.append(f"{modes[best]['tokens_per_s']:,.0f} (**{ahead_of(modes, cell, best):.3f}×**)")
    return [*cells, f"{modes['distca']['tokens_per_s']:,.0f}"]


def table() -> str:
    """The table in Markdown, with a link to each row's file."""
    head = ["mix, tokens for each GPU, numbers", *(f"{way} (DistCA over it)" for way in _WAYS), "DistCA", "GPUs"]
    found: dict[tuple[str, str], list[str]] = {}
    for file in FILES:
        report = kept(file)
        hardware = re.sub(" ?NVIDIA| 80GB HBM3", "", report["hardware"])
        for workload, numbers, modes, cell in runs_of(report):
            name = f"{MIXES[workload.split()[0]]}, {tokens_of(report)}, {numbers}"
            cells, row = row_of(modes, cell), (name, hardware)
            if row in found:
                found[row] = _filled(found[row], cells, file)
            else:
                found[row] = [name, *cells, f"[{hardware}](benchmarks/results/{file}.json)"]
    return rows(head, ["---"] * len(head), *found.values())


def _filled(row: list[str], cells: list[str], file: str) -> list[str]:
    """A row whose cells that lack a figure have another file's, with a link to it."""
    link = f"[other run](benchmarks/results/{file}.json)"
    fills = [cell if cell == _LACKS else f"{cell}, {link}" for cell in cells[:-1]]
    ways = [new if old == _LACKS else old for old, new in zip(row[1:-2], fills, strict=True)]
    return [row[0], *ways, *row[-2:]]
