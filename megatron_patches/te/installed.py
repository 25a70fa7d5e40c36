"""Says which Transformer Engine is installed and whether it can be used, without importing it; hides it without a GPU.

Megatron-Core imports Transformer Engine wherever that is installed. Without a GPU this import fails. So there imports
are made to fail in the way that Megatron-Core expects of a package that is not installed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "transformer_engine"
SUPPORTED = ">=2.11,<2.21"
"""The versions with which this project works, as pip writes them."""
_FIRST, _BEYOND = (2, 11), (2, 21)


def installed_version() -> str | None:
    """Returns the version of the Transformer Engine that an import would take, such as "2.11.0"; None without one."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return None


def why_not_supported() -> str | None:
    """Returns why the installed Transformer Engine cannot be used, as part of a sentence; None if it can."""
    version = installed_version()
    if version is None:
        return f"Transformer Engine is not installed; versions {SUPPORTED} are supported"
    if not _FIRST <= tuple(map(int, re.findall(r"\d+", version)[:2])) < _BEYOND:
        return f"Transformer Engine is {version}; versions {SUPPORTED} are supported"
    try:
        metadata.version(f"{NAME}_torch")
    except metadata.PackageNotFoundError:
        return f"Transformer Engine {version} is here without its part for PyTorch, {NAME}_torch"
    return None


def hide_without_gpu() -> None:
    """Makes imports of Transformer Engine fail, as if it were not installed, while torch has no GPU.

    It must be called before Megatron-Core is imported, and may be called again."""
    if NAME not in sys.modules and not any(isinstance(finder, _NotWithoutGpu) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NotWithoutGpu())


class _NotWithoutGpu:
    """An import hook that refuses to load Transformer Engine while torch has no GPU, and leaves all else to others."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != NAME:
            return None
        import torch

        return None if torch.cuda.is_available() else ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        raise ModuleNotFoundError(f"{spec.name} is hidden: it needs a GPU, and torch has none.", name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        raise AssertionError("no module is ever created")
