"""Result files, and what a result depends on: command, hardware and versions."""

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
    """Version by package, Python first; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware(ranks: int) -> str:
    """The GPUs that ``ranks`` ranks ran on, or the cores that they shared."""
    import torch

    if torch.cuda.is_available():
        return f"{ranks} × {torch.cuda.get_device_name()}"
    return f"{ranks} ranks on {os.cpu_count()} cores, {platform.machine()}"


def command_line(program: str) -> str:
    """``program``, as it is called, with the arguments that this process was given."""
    return f"{program} {shlex.join(sys.argv[1:])}".rstrip()


def header(command: str, ranks: int) -> dict[str, Any]:
    """Returns the beginning of a report of ``ranks`` ranks."""
    return {"command": command, "hardware": hardware(ranks), "versions": versions()}


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Writes the report as JSON, into a folder that is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
