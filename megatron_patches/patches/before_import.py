"""Prepares the import of Megatron-Core on machines without a GPU or without Triton."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def compile_on_gpus_only() -> None:
    """Makes torch.compile return Megatron's functions unchanged if there is no GPU.

    It must be called before Megatron is imported. Megatron decorates functions with torch.compile, which on CPUs needs
    a C++ compiler.
    """
    if not any(isinstance(finder, _BeforeMegatron) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeMegatron())


class _BeforeMegatron:
    """A finder in ``sys.meta_path`` that finds nothing, but replaces torch.compile when Megatron-Core is imported."""

    done = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        # ``versions.py`` only looks up where the package ``megatron.core`` lies, which needs no torch. So the name of
        # the package itself is ignored here, and torch is imported at the first module inside the package.
        if self.done or not name.startswith("megatron.core."):
            return
        self.done = True
        import torch

        if not torch.cuda.is_available():
            torch.compile = _not_megatrons(torch.compile)  # type: ignore[assignment]


def _not_megatrons(compile_: Callable[..., Any]) -> Callable[..., Any]:

    @wraps(compile_)
    def compiled(model: Any = None, **options: Any) -> Any:
        if model is None:
            return partial(compiled, **options)
        return model if model.__module__.startswith("megatron.") else compile_(model, **options)

    return compiled


def do_without_triton() -> None:
    """Puts a stub in place of Megatron's kernels for stashing rows of experts (paged_stash), if Triton is missing.

    Newer versions of Megatron import that module with every model, but only experts on GPUs need it.
    """
    if find_spec("triton") is None:
        kernels: Any = ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        kernels.GLOBAL_BLOCK_SIZE = kernels.paged_stash_copy_kernel = kernels.paged_stash_pop_kernel = None
        sys.modules.setdefault(kernels.__name__, kernels)
