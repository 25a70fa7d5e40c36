"""Megatron-Core on CPUs, to rehearse what is not Transformer Engine.

The files that make that possible belong to ``megatron_patches``, and are taken one by one, without the package.
"""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

_PATCHES = Path(__file__).parents[2] / "megatron_patches" / "patches"


def use_cpus() -> None:
    """Make Megatron-Core run on CPUs in this process; to be called before it is imported."""
    _file("jit").compile_on_gpus_only()
    _file("without_triton").do_without_triton()
    _file("cpu").use_cpu()


def _file(name: str) -> Any:
    spec = spec_from_file_location(f"benchmarks_peers_{name}", _PATCHES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
