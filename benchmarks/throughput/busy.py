"""How much of a step a rank computes.

On GPUs a few batches run once more under torch's profiler: busy is the time in which at least one kernel other than
communication's runs. What is left of the step (waiting for other ranks, transfers that nothing hides, launch gaps) is
idle. On CPUs busy is the process's CPU time, which says little where ranks share cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

_COMMUNICATION = ("nccl", "nvshmem", "wait_signal", "wait_until", "memcpy ptop", "memcpy htod", "memcpy dtoh")


def gpu_busy_seconds(steps: Callable[[], None]) -> float | None:
    """Run ``steps``; returns seconds in which a kernel that is not communication ran, None if the profiler saw none."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        steps()
        torch.cuda.synchronize()
    spans = (
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
        and not any(word in event.name.lower() for word in _COMMUNICATION)
    )
    return covered(spans) / 1e6 or None


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
