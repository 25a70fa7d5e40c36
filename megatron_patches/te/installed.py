"""Says whether a supported Transformer Engine is installed, and hides Transformer Engine where torch has no GPU.

Megatron-Core imports an installed Transformer Engine. Without a GPU the import fails with an error that Megatron-Core
does not catch. An import hook raises ModuleNotFoundError instead, which Megatron-Core catches.
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
    """Returns the version of the installed Transformer Engine, such as "2.11.0"; None if none is installed."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return None


def why_not_supported() -> str | None:
    """Returns why Transformer Engine cannot be used, without a final period; None if it can."""
    version = installed_version()
    if version is None:
        return f"Transformer Engine is not installed; versions {SUPPORTED} are supported"
    if not _FIRST <= tuple(map(int, re.findall(r"\d+", version)[:2])) < _BEYOND:
        return f"Transformer Engine is {version}; versions {SUPPORTED} are supported"
    try:
        metadata.version(f"{NAME}_torch")
    except metadata.PackageNotFoundError:
        return f"Transformer Engine {version} is installed without its part for PyTorch, {NAME}_torch"
    return None


def hide_without_gpu() -> None:
    """Makes imports of Transformer Engine raise ModuleNotFoundError while torch has no GPU.

    This must be called before Megatron-Core is imported."""
    if NAME not in sys.modules and not any(isinstance(finder, _NotWithoutGpu) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NotWithoutGpu())


class _NotWithoutGpu:
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
