"""Versions of what a result depends on, for result files."""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGES = ("torch", "megatron-core", "flash-attn-4", "nvidia-nccl-cu13", "nvidia-nvshmem-cu13", "numpy")


def versions() -> dict[str, str]:
    """Version by package, Python first; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
