"""Says how much host memory is free, and makes the C allocator keep freed memory, for ranks that compute on CPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import psutil

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Numbers of the parameters of glibc's mallopt, from malloc.h."""


def keep_freed_memory() -> None:
    """Makes the C allocator keep freed blocks in the process, and not return them to the system.

    Attention on a CPU allocates and frees a large block of scores many times. Fresh pages for each block would take CPU
    time, more for some shapes than for others, and would distort measurements. Without glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_TOP_PAD, 2**26)


def free_host_memory(root: Path = Path("/")) -> int:
    """Returns the bytes that this process can still allocate: on the machine, and within its control groups.

    Args:
        root: the folder with /proc and /sys; tests give another one.
    """
    return min([int(psutil.virtual_memory().available), *_left_in_groups(root)])


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yields the bytes that are left in each control group of this process, and in the groups around it.

    Memory that caches files counts as left, as the system can drop it."""
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
    """Yields the bytes left in one control group, if it has a limit; the names are those of its files and entries."""
    try:
        most = (folder / limit).read_text().strip()
        files = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        if most != "max":
            yield int(most) - int((folder / used).read_text()) + int(files.get(inactive, 0))
    except (OSError, ValueError):
        return
