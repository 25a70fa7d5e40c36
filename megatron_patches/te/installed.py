"""The Transformer Engine that is installed, found without importing it, and the reasons against its use.

Megatron-Core imports Transformer Engine wherever it is installed, and uses its Adam. Without a GPU the import fails, so
it is hidden from Megatron-Core there.
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
_FIRST, _BEYOND = (2, 11), (2, 21)


def installed_version() -> str | None:
    """Returns the version of the Transformer Engine that an import would take, such as "2.11.0"; None without one."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return None


def why_not_supported() -> str | None:
    """Returns, in words, the Transformer Engine that is here and the one that is needed; None if it can be used."""
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
    """A finder of modules that finds Transformer Engine before others do, and refuses to load it."""

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
