"""The name of the machine that a rank is on."""

from __future__ import annotations

import socket
from pathlib import Path


def machine_name() -> str:
    """A name that no other machine has; host names alone repeat where machines start from one image."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text().strip() if boot.is_file() else "")
