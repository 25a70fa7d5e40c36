"""Host memory: how much of it is free, and letting it stay with the process for ranks and measurements on CPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import psutil

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


def free_host_memory(root: Path = Path("/")) -> int:
    """Bytes that processes like this one can still take: of the machine, and of what a scheduler or container allows.

    Args:
        root: where /proc and /sys are.
    """
    return min([int(psutil.virtual_memory().available), *_left_in_groups(root)])


def _left_in_groups(root: Path) -> Iterator[int]:
    """Bytes left in every control group that this process is in; pages of files can be given up."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        if controllers:  # version 1
            top, names = top / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if (folder / names[1]).exists() and folder.is_relative_to(top):
                yield from _left_in(folder, *names)


def _left_in(folder: Path, limit: str, used: str, inactive: str) -> Iterator[int]:
    try:
        most = (folder / limit).read_text().strip()
        files = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        if most != "max":
            yield int(most) - int((folder / used).read_text()) + int(files.get(inactive, 0))
    except (OSError, ValueError):
        return
