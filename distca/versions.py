"""Writes reports of results, with the command, the hardware and the package versions behind them."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "megatron-core",
    "flash-attn-4",
    "transformer-engine",
    "nvidia-nccl-cu13",
    "nvidia-nvshmem-cu13",
    "numpy",
)


def versions() -> dict[str, str]:
    """Returns the version of each package, and of Python; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware(ranks: int) -> str:
    """Returns the hardware of ``ranks`` ranks in words: their number and GPU, or the cores that they shared."""
    import torch

    if torch.cuda.is_available():
        return f"{ranks} × {torch.cuda.get_device_name()}"
    return f"{ranks} ranks on {os.cpu_count()} cores, {platform.machine()}"


def command_line(program: str) -> str:
    """Returns this process's command line, as a user types it: ``program`` with this process's arguments."""
    return f"{program} {shlex.join(sys.argv[1:])}".rstrip()


def header(command: str, ranks: int) -> dict[str, Any]:
    """Returns the first entries of a report: command, hardware of ``ranks`` ranks, and versions."""
    return {"command": command, "hardware": hardware(ranks), "versions": versions()}


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Writes a report as JSON. The file's folder is made if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
