"""Host memory that stays with the process: for ranks and measurements on CPUs."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Names of glibc's mallopt, from malloc.h."""


def keep_freed_memory() -> None:
    """Let the allocator keep blocks that are freed, instead of giving them back to the system.

    Attention on a CPU takes and frees a large block of scores many times over. Fetching fresh pages for each would
    count as CPU time of the kernel, more for some shapes than for others. Without glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_TOP_PAD, 2**26)
