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
    _exchange_by_lists()
    _draw_all_experts()


def _exchange_by_lists() -> None:
    """Let rows for experts be exchanged by lists of sizes, which Megatron makes of tensors on GPUs only."""
    from megatron.core.transformer.moe import token_dispatcher

    exchange = token_dispatcher.all_to_all

    def by_lists(group: Any, rows: Any, *sizes: Any, **named: Any) -> Any:
        return exchange(
            group, rows, *(None if each is None else [int(size) for size in each] for each in sizes), **named
        )

    token_dispatcher.all_to_all = by_lists


def _draw_all_experts() -> None:
    """Let every rank draw the experts of all ranks, as this project's models do. Megatron would draw the
    same ones on every rank of CPUs."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    build = SequentialMLP.__init__

    def build_mine(self: Any, *sizes: Any, **named: Any) -> None:
        group = named["pg_collection"].ep
        for rank in range(group.size()):
            build(self if rank == group.rank() else SequentialMLP.__new__(SequentialMLP), *sizes, **named)

    SequentialMLP.__init__ = build_mine


def _file(name: str) -> Any:
    spec = spec_from_file_location(f"benchmarks_peers_{name}", _PATCHES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
