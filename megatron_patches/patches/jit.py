"""torch.compile for megatron's small functions on GPUs only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
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
