"""Fuse megatron's small functions on GPUs only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def compile_on_gpus_only() -> None:
    """Put a module in place of ``megatron.core.jit`` that leaves functions as they are where there is no GPU.

    megatron decorates its fusions with torch.compile when it is imported. On CPUs that would need a C++ compiler at run
    time, and importing torch's compiler takes as long as importing torch. Without effect where megatron was imported
    before.
    """
    module: Any = ModuleType("megatron.core.jit")
    module.jit_fuser = _fused_on_gpus
    module.noop_decorator = _as_it_is
    module.enable_jit_fuser = lambda: setattr(module, "jit_fuser", _fused_on_gpus)
    module.disable_jit_fuser = lambda: setattr(module, "jit_fuser", _as_it_is)
    sys.modules.setdefault(module.__name__, module)


def _fused_on_gpus(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    return torch.compile(function) if torch.cuda.is_available() else function


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
