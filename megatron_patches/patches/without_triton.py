"""Imports of megatron-core where Triton is missing, as it is with torch for CPUs."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def do_without_triton() -> None:
    """Puts a module without kernels in place of megatron's module of Triton kernels.

    Newer versions import that one with every model, although only mixtures of experts on GPUs run its kernels. A module
    named triton must not stand in, as torch would take it for the real one.
    """
    if find_spec("triton") is None:
        kernels: Any = ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        kernels.GLOBAL_BLOCK_SIZE = kernels.paged_stash_copy_kernel = kernels.paged_stash_pop_kernel = None
        sys.modules.setdefault(kernels.__name__, kernels)
