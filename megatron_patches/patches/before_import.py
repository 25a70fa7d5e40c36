"""Calls before megatron-core is imported: no compiler where there is no GPU, and no kernels where Triton is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def compile_on_gpus_only() -> None:
    """Makes torch.compile leave megatron's functions as they are where there is no GPU.

    megatron decorates its fusions with torch.compile when it is imported. On CPUs that would need a C++ compiler at run
    time, and importing torch's compiler takes as long as importing torch. It has no effect once megatron was imported.
    """
    if not any(isinstance(finder, _BeforeMegatron) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeMegatron())


class _BeforeMegatron:
    """A finder of modules that finds none. When a part of megatron is imported, torch will be needed anyway: then it
    replaces torch.compile."""

    done = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        # Only its parts count: megatron.core itself is looked up for its version, which needs no torch.
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
    """Puts a module without kernels in place of megatron's module of Triton kernels, where there is no Triton.

    Newer versions import that one with every model, although only mixtures of experts on GPUs run its kernels. A module
    named triton must not stand in, as torch would take it for the real one.
    """
    if find_spec("triton") is None:
        kernels: Any = ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        kernels.GLOBAL_BLOCK_SIZE = kernels.paged_stash_copy_kernel = kernels.paged_stash_pop_kernel = None
        sys.modules.setdefault(kernels.__name__, kernels)
