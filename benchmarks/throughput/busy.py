"""How much of a step a rank computes, and what.

On GPUs a few batches run once more under torch's profiler: busy is the time in which at least one kernel other than
communication's runs. What is left of the step (waiting for other ranks, transfers that nothing hides, launch gaps) is
idle. On CPUs busy is the process's CPU time, which says little where ranks share cores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import nlargest
from operator import itemgetter

import torch

# The first kind with a word that is in a kernel's name, in lower case, is the kernel's.
_KINDS = {
    "communication": ("nccl", "nvshmem", "wait_signal", "wait_until", "memcpy ptop", "memcpy htod", "memcpy dtoh"),
    "attention": ("flash",),
    "matrix products": ("nvjet", "gemm", "cublas"),
    "recurrent cores": (
        *("chunk_fwd", "chunk_bwd", "chunk_cp", "chunk_gated", "chunk_local", "wy_repr", "recompute_w_u"),
        *("chunk_gradients", "core_rows"),
    ),
}
_LARGEST, _NAME = 8, 100  # kernels of a kind that are named one by one; letters of a name


@dataclass(frozen=True)
class Kernel:
    """A kernel or copy that ran; seconds."""

    name: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        """The purpose of a kernel, by its name; "other" where that does not tell."""
        name = self.name.lower()
        return next((kind for kind, words in _KINDS.items() if any(word in name for word in words)), "other")


@dataclass(frozen=True)
class Traced:
    """The work of one rank's GPU.

    Attributes:
        busy_s: seconds in which a kernel that is not communication ran.
        kinds: seconds of all kernels by kind; kernels on several streams run at the same time.
        largest: by kind, seconds of the kernels that took most, by the beginnings of their names.
    """

    busy_s: float
    kinds: dict[str, float]
    largest: dict[str, dict[str, float]]


def trace(steps: Callable[[], None]) -> Traced | None:
    """Run ``steps`` under the profiler; None if it saw no kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        steps()
        torch.cuda.synchronize()
    kernels = [
        Kernel(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    return summary(kernels) if kernels else None


def summary(kernels: Iterable[Kernel]) -> Traced:
    """The work in all kernels of a rank."""
    names: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    spans = []
    for kernel in kernels:
        names[kernel.kind][kernel.name[:_NAME]] += kernel.end - kernel.start
        if kernel.kind != "communication":
            spans.append((kernel.start, kernel.end))
    kinds = {kind: sum(seconds.values()) for kind, seconds in names.items()}
    largest = {kind: dict(nlargest(_LARGEST, seconds.items(), key=itemgetter(1))) for kind, seconds in names.items()}
    return Traced(covered(spans), kinds, largest)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
