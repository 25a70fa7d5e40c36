"""Ending with the process that started this one: killed, it can tell nobody. On Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Get SIGTERM when the thread that started this process ends, however it ends. Safe between fork and exec."""
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_with_torchrun(environment: Mapping[str, str] = os.environ) -> None:
    """The same for a rank that torchrun started, from a thread that waits for it to the end. Of others nobody knows
    what their parents do next."""
    if "TORCHELASTIC_RUN_ID" in environment:
        end_with_parent()
