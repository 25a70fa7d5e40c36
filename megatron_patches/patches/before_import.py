"""Prepares the import of Megatron-Core on machines without a GPU or without Triton.

``megatron_patches/__init__.py`` calls both functions before anything imports ``megatron.core``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def compile_on_gpus_only() -> None:
    """Makes torch.compile return Megatron's functions as they are if there is no GPU.

    Megatron decorates its fusions with torch.compile when it is imported. On CPUs the compiled functions need a C++
    compiler at run time, and importing torch's compiler takes as long as importing torch. A call after Megatron was
    imported has no effect.
    """
    if not any(isinstance(finder, _BeforeMegatron) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeMegatron())


class _BeforeMegatron:
    """A hook of Python's import that replaces torch.compile when a part of Megatron-Core is first imported.

    It finds no modules itself. Until that import torch may not be needed, so this module does not import it before.
    """

    done = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Python calls it for every import; None leaves the import to other finders."""
        # megatron.core alone does not count: it is looked up for its version, which needs no torch.
        if self.done or not name.startswith("megatron.core."):
            return
        self.done = True
        import torch

        if not torch.cuda.is_available():
            torch.compile = _not_megatrons(torch.compile)  # type: ignore[assignment]


def _not_megatrons(compile_: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch.compile without effect on functions of Megatron's modules."""

    @wraps(compile_)
    def compiled(model: Any = None, **options: Any) -> Any:
        if model is None:
            return partial(compiled, **options)
        return model if model.__module__.startswith("megatron.") else compile_(model, **options)

    return compiled


def do_without_triton() -> None:
    """Puts an empty module in place of Megatron's module of Triton kernels, if Triton is missing.

    Newer versions of Megatron import that module with every model, although only experts on GPUs run its kernels. An
    empty module named triton would not do, as torch would take it for the real one.
    """
    if find_spec("triton") is None:
        kernels: Any = ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        kernels.GLOBAL_BLOCK_SIZE = kernels.paged_stash_copy_kernel = kernels.paged_stash_pop_kernel = None
        sys.modules.setdefault(kernels.__name__, kernels)
