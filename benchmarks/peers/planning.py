"""Seconds that cuDNN takes to plan attention of a shape that it has not seen.

Transformer Engine calls cuDNN's fused attention by two functions. On a shape that is new, such a call returns only
after a plan was built on the host, in tenths of a second; otherwise it queues a kernel and returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

_CALLS = ("fused_attn_fwd", "fused_attn_bwd")
_LONG_S = 0.05
"""Seconds on the host from which a call is taken to have planned: one that queues a kernel takes far less."""


class PlanningTime:
    """Adds up the seconds of calls that planned, from when it is made on."""

    def __init__(self, module: str = "transformer_engine_torch") -> None:
        """Watch the calls of Transformer Engine's extension; where it is not installed nothing is ever planned."""
        self._seconds = 0.0
        try:
            extension: Any = import_module(module)
        except ImportError:
            return
        for name in _CALLS:
            setattr(extension, name, self._watched(getattr(extension, name)))

    def take(self) -> float:
        """Seconds since the last call of this."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            took = time.perf_counter() - began
            if took >= _LONG_S:
                self._seconds += took
            return result

        return watched
