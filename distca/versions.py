"""What a result depends on, for result files: versions and hardware."""

from __future__ import annotations

import os
import platform
from importlib import metadata

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
