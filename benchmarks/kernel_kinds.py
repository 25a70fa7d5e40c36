"""How far a kernel's results on cut documents are from float64, beside its own on whole documents, by kind of layer.

    python -m benchmarks.kernel_kinds --output benchmarks/results/kernel_kinds.json

Documents are cut into tasks as servers get them: at tile borders, off them, and around the window. Every task has its
queries and the keys that these see, and nothing before. Its o and dQ, and float32 sums of dK and dV over
tasks, are compared with a plain torch kernel's in float64. So are those of the same kernel
given whole documents. The ratio of the two errors says what cutting costs. Sums are rounded to the rows' type once more
where a home adds what servers send; the ratio after that is kept beside it. Sinks are added as at home, to o and
log-sum-exp. Deterministic kernels run twice as well: bits have to be the same. Without a GPU, ``--kernel reference``
rehearses in float32 with small shapes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distca.attention.flash4 import Flash4Kernel
from distca.attention.kernel import Kernel, TaskBatch
from distca.attention.reference import ReferenceKernel
from distca.attention.sink import sink_gradient, with_sink
from distca.plan.geometry import first_key
from distca.plan.kinds import AttentionKind
from distca.testing.reference_attention import relative_error
from distca.versions import command_line, header, write_report

MOST_RATIO = 1.1
"""The largest ratio of errors on cut documents over those on whole ones."""
HEADS = {"32/8x128": (32, 8, 128), "64/8x64": (64, 8, 64), "16/8x256": (16, 8, 256)}
DOCUMENTS, SMALL_DOCUMENTS = (6000, 1, 777, 1501, 130), (300, 1, 77, 130)
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window 128": {"window": 128},
    "window 1,024": {"window": 1024},
    "window 4,096": {"window": 4096},
    "sinks": {"sink": True},
    "window 128, sinks": {"window": 128, "sink": True},
    "softcap 50": {"softcap": 50.0},
    "softcap 50, window 1,024": {"softcap": 50.0, "window": 1024},
    "softcap 5, window 100, sinks": {"softcap": 5.0, "window": 100, "sink": True},
}


@dataclass(frozen=True)
class Inputs:
    """Rows of all documents, one after the other, and the sinks.

    Attributes:
        q: [rows, heads, head_dim].
        kv: [rows, 2, kv_heads, head_dim].
        do: like ``q``.
        sink: [heads] float32, or None.
    """

    q: torch.Tensor
    kv: torch.Tensor
    do: torch.Tensor
    sink: torch.Tensor | None

    def double(self) -> Inputs:
        sink = None if self.sink is None else self.sink.double()
        return Inputs(self.q.double(), self.kv.double(), self.do.double(), sink)


def main() -> None:
    """Measure all shapes and kinds and write the report; exit code 1 where a ratio is too high or bits differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--kernel", choices=("flash4", "reference"), default="flash4")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--heads", nargs="+", choices=HEADS, default=list(HEADS), help="heads/kv heads x head dimension"
    )
    asked = parser.parse_args()
    began = time.perf_counter()
    on_gpu = asked.kernel == "flash4"
    shapes = {name: HEADS[name] for name in asked.heads} if on_gpu else {"4/2x16": (4, 2, 16)}
    results = {
        shape: {
            name: measured(AttentionKind(heads[-1] ** -0.5, **kind), heads, asked.seeds, on_gpu)
            for name, kind in KINDS.items()
        }
        for shape, heads in shapes.items()
    }
    ratios = [kind["ratio"][part] for shape in results.values() for kind in shape.values() for part in kind["ratio"]]
    repeats = [kind["deterministic"] for shape in results.values() for kind in shape.values()]
    report: dict[str, Any] = {
        **header(command_line("python -m benchmarks.kernel_kinds"), 1),
        "kernel": asked.kernel,
        "documents": DOCUMENTS if on_gpu else SMALL_DOCUMENTS,
        "worst_ratio": max(ratios),
        "all_deterministic": not any(each is False for each in repeats),
        "results": results,
        "took_s": round(time.perf_counter() - began, 1),
    }
    write_report(asked.output, report)
    sys.stdout.write(f"worst ratio {max(ratios):.3f}, all deterministic: {report['all_deterministic']}\n")
    sys.exit(0 if max(ratios) <= MOST_RATIO and report["all_deterministic"] else 1)


def measured(kind: AttentionKind, heads: tuple[int, int, int], seeds: int, on_gpu: bool) -> dict[str, Any]:
    """Errors of one kind, root mean square over seeds: on cut and on whole documents, and their ratio; and whether the
    deterministic kernel repeats itself, or why it cannot run."""
    lengths = DOCUMENTS if on_gpu else SMALL_DOCUMENTS
    whole = [(number, 0, length) for number, length in enumerate(lengths)]
    cut = cut_tasks(lengths, kind.window, 128 if on_gpu else 16)
    kernel: Kernel = Flash4Kernel() if on_gpu else ReferenceKernel()
    errors: dict[str, dict[str, float]] = defaultdict(dict)
    for seed in range(seeds):
        inputs = drawn(heads, sum(lengths), seed, kind.sink, on_gpu)
        exact = run(ReferenceKernel(), kind, lengths, whole, inputs.double())
        for name, tasks in (("whole", whole), ("cut", cut)):
            for part, values in run(kernel, kind, lengths, tasks, inputs).items():
                for way, made in {name: values, f"{name}, sums rounded": values.to(inputs.q.dtype)}.items():
                    squares = relative_error(made, exact[part]) ** 2 / seeds
                    errors[way][part] = errors[way].get(part, 0.0) + squares
        del exact
    roots = {name: {part: square**0.5 for part, square in parts.items()} for name, parts in errors.items()}
    ratio, rounded = (
        {part: roots[f"cut{way}"][part] / roots[f"whole{way}"][part] for part in roots["cut"]}
        for way in ("", ", sums rounded")
    )
    both = {"ratio": ratio, "ratio, sums rounded": rounded}
    return {**roots, **both, "tasks": len(cut), "deterministic": _repeats(kind, lengths, cut, inputs, on_gpu)}


def _repeats(
    kind: AttentionKind, lengths: tuple[int, ...], tasks: list[tuple[int, int, int]], inputs: Inputs, on_gpu: bool
) -> bool | str:
    kernel: Kernel = Flash4Kernel(deterministic=True) if on_gpu else ReferenceKernel()
    try:
        first, second = (run(kernel, kind, lengths, tasks, inputs) for _ in range(2))
    except Exception as error:  # compilers and drivers raise anything
        return (str(error).splitlines() or [type(error).__name__])[0]
    return all(torch.equal(first[part], second[part]) for part in first)


def drawn(heads: tuple[int, int, int], rows: int, seed: int, sink: bool, on_gpu: bool) -> Inputs:
    """Normal numbers, the same on every device."""
    q, kv, do, sinks = _normal(heads, rows, seed, on_gpu)
    return Inputs(q, kv, do, sinks if sink else None)


@lru_cache(maxsize=8)
def _normal(heads: tuple[int, int, int], rows: int, seed: int, on_gpu: bool) -> tuple[torch.Tensor, ...]:
    """q, k and v, dO, and sinks; kept for the next kind, since a CPU takes seconds to draw them."""
    generator = torch.Generator().manual_seed(seed)
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    count, kv_count, dim = heads
    return normal(rows, count, dim), normal(rows, 2, kv_count, dim), normal(rows, count, dim), normal(count).float()


def cut_tasks(lengths: tuple[int, ...], window: int, tile: int) -> list[tuple[int, int, int]]:
    """(document, first query, end) of every task: documents are cut at multiples of tiles, off them, and a row before,
    at and behind the window."""
    tasks = []
    for number, length in enumerate(lengths):
        wanted = {tile, 3 * tile, 3 * tile + 1, length // 2, length - 7}
        if window:
            wanted |= {window - 1, window, window + 1}
        borders = [0, *sorted(each for each in wanted if 0 < each < length), length]
        tasks += [(number, begin, end) for begin, end in pairwise(borders)]
    return tasks


def run(
    kernel: Kernel,
    kind: AttentionKind,
    lengths: tuple[int, ...],
    tasks: list[tuple[int, int, int]],
    inputs: Inputs,
) -> dict[str, torch.Tensor]:
    """o, dQ, dK, dV and the gradient of sinks, if there are some, of all documents' rows, computed task by task in one
    batch."""
    offset = np.cumsum(lengths) - np.array(lengths)
    document, start, stop = np.array(tasks).T
    first = first_key(kind.window, start)
    device = inputs.q.device
    borders = [np.concatenate(([0], np.cumsum(rows))) for rows in (stop - start, stop - first)]
    batch = TaskBatch.of(borders[0], borders[1], device)
    spans = [
        slice(int(begin), int(end))
        for begin, end in zip(offset[document] + first, offset[document] + stop, strict=True)
    ]
    # Tasks are in the order of rows, so that queries lie as they are.
    regions = torch.cat([inputs.kv[span] for span in spans])
    k, v = regions[:, 0], regions[:, 1]
    o, lse = kernel.forward(inputs.q, k, v, batch, kind)
    if inputs.sink is not None:
        o, lse = with_sink(o, lse, inputs.sink)
    dq, dk, dv = kernel.backward(inputs.do, inputs.q, k, v, o, lse, batch, kind)
    wide = torch.promote_types(dk.dtype, torch.float32)
    total = torch.zeros_like(inputs.kv, dtype=wide)
    for span, begin, end in zip(spans, borders[1][:-1].tolist(), borders[1][1:].tolist(), strict=True):
        total[span, 0] += dk[begin:end].to(wide)
        total[span, 1] += dv[begin:end].to(wide)
    out = {"o": o, "dq": dq, "dk": total[:, 0], "dv": total[:, 1]}
    if inputs.sink is not None:
        out["dsink"] = sink_gradient(inputs.do, o, lse, inputs.sink)
    return out


if __name__ == "__main__":
    main()
