"""torch's profiler over some steps: every rank writes what it did as a trace, for Perfetto or TensorBoard."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


class ProfilerWindow:
    """Records steps on this rank; one that ends within them leaves what there is.

    Args:
        wanted: first and last step; None records nothing.
        folder: of the traces.
        rank: this one.
    """

    def __init__(self, wanted: tuple[int, int] | None, folder: Path, rank: int) -> None:
        self._wanted, self._folder, self._rank = wanted, folder, rank
        self._profiler: torch.profiler.profile | None = None
        self._first = self._last = 0

    def before(self, step: int) -> None:
        """Begin to record, if this is the first of the steps that this run does."""
        if self._wanted is not None and self._profiler is None and self._wanted[0] <= step <= self._wanted[1]:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler, self._first = torch.profiler.profile(activities=activities), step
            self._profiler.start()
        self._last = step

    def after(self, step: int) -> None:
        """Write the trace, if this was the last of them."""
        if self._wanted is not None and step == self._wanted[1]:
            self.finish()

    def finish(self) -> None:
        """Write what was recorded; what cannot be written is warned about."""
        if self._profiler is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profiler.stop()
        name = f"steps_{self._first:06d}_{self._last:06d}_rank_{self._rank:04d}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._folder / name))
        except OSError as error:
            logger.warning("%s cannot be written (%s).", self._folder / name, error.strerror)
        self._profiler = self._wanted = None
