"""Fuse megatron's small functions on GPUs only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import ModuleType
from typing import Any


def compile_on_gpus_only() -> None:
    """Let torch.compile leave megatron's functions as they are where there is no GPU.

    megatron decorates its fusions with it when it is imported. On CPUs that would need a C++ compiler at run time, and
    importing torch's compiler takes as long as importing torch. Without effect where megatron was imported before.
    """
    if not any(isinstance(finder, _BeforeMegatron) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeMegatron())


class _BeforeMegatron:
    """Finds nothing; that a part of megatron is looked for says that torch is needed anyway."""

    done = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        # megatron.core by itself may be looked for to know its version, which needs no torch.
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
