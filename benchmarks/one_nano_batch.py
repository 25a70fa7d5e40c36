"""Kept runs without ping-pong beside DistCA's, as a table: ``python -m benchmarks.tables`` writes it."""

from __future__ import annotations

from statistics import median

from benchmarks.tables import MIXES, Figures, kept, rows

FILES = {
    "throughput_2_gpus_peers_128k": "8B shape, 128K tokens for each GPU",
    "baselines_2_gpus_64k": "8B shape, 64K",
    "experts_a3b_cut_2_gpus_nano_batches": "Qwen3-30B-A3B's width, EP 2, 64K",
    "experts_a3b_cut_4_gpus_nano_batches": "Qwen3-30B-A3B's width, EP 4, 64K",
    "hybrid_qwen3.5_9b_cut_2_gpus": "Qwen3.5-9B's width, 128K",
}
"""Runs of four layers over NVLink, and what a page calls them."""
BOTH = ("distca", "distca-unsplit")


def table() -> str:
    """How many times as fast one nano-batch is as two, and the peak memory of both, in Markdown."""
    lines = [["layers", "GPUs", *MIXES.values(), "peak with two, GiB", "with one"], ["---"] * 6]
    for file, what in FILES.items():
        report = kept(file)
        cells = [report["cells"][f"{mix} 128K"]["modes"] for mix in MIXES]
        peaks = [max(cell[mode]["memory_gib"]["max"] for cell in cells if mode in cell) for mode in BOTH]
        lines.append(
            [f"[{what}]({file}.json)", report["hardware"].replace("NVIDIA ", "")]
            + [_speeds(cell) for cell in cells]
            + [f"{peak:.1f}" for peak in peaks]
        )
    return rows(*lines)


def _speeds(modes: dict[str, Figures]) -> str:
    """Speed of one over that of two: by the median over batches, and by tokens per second."""
    if BOTH[1] not in modes:
        return "–"
    two, one = (modes[mode] for mode in BOTH)
    by_batch = median(theirs / ours for theirs, ours in zip(two["steps_s"], one["steps_s"], strict=True))
    return f"{by_batch:.3f}×, {one['tokens_per_s'] / two['tokens_per_s']:.3f}×"
