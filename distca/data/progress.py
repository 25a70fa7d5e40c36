"""How far tokenizing is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from distca.log import console
from distca.words import format_bytes

logger = logging.getLogger(__name__)

_LINE_S = 30.0


@contextmanager
def tokenizing_progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show how much of ``total`` bytes is done; yields what takes the bytes done since its last call."""
    if not console().is_terminal:
        yield _Lines(total).advance
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console()) as progress:
        task = progress.add_task("tokenizing", total=total)
        yield lambda size: progress.advance(task, size)


class _Lines:
    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._before: int | None = None
        self._began = self._said = time.monotonic()

    def advance(self, size: int) -> None:
        if self._before is None:
            self._before = size  # what an earlier start has done
        self._done += size
        now = time.monotonic()
        if now - self._said > _LINE_S:
            self._said = now
            rate = (self._done - self._before) / (now - self._began)
            left = max(self._total - self._done, 0) / max(rate, 1)
            done, total = format_bytes(self._done), format_bytes(self._total)
            logger.info("tokenizing: %s of %s, %s/s, %.0f s to go", done, total, format_bytes(rate), left)
