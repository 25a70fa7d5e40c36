"""Garbage collection once a step, and at no other time."""

from __future__ import annotations

import gc
from types import TracebackType


class SteadyGarbage:
    """Turns automatic collection off while it is entered; :meth:`collect` is then called once per step.

    Objects that live after the first step (modules, the model, the data) are set aside and never looked at again. So a
    collection looks at the objects of a step only and takes about a millisecond.
    """

    def __init__(self) -> None:
        self._frozen = False

    def __enter__(self) -> SteadyGarbage:
        gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        gc.unfreeze()
        gc.enable()

    def collect(self) -> None:
        """Collect everything that was created since the first call."""
        gc.collect()
        if not self._frozen:
            gc.freeze()
            self._frozen = True
