"""Megatron-Core on CPUs, to rehearse what is not Transformer Engine.

The files that make that possible belong to ``megatron_patches``, and are taken one by one, without the package.
"""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

_PATCHES = Path(__file__).parents[2] / "megatron_patches" / "patches"


def use_cpus() -> None:
    """Make Megatron-Core run on CPUs in this process; to be called before it is imported."""
    before_import = _file("before_import")
    before_import.compile_on_gpus_only()
    before_import.do_without_triton()
    _file("cpu").use_cpu()
    _exchange_by_lists()
    _draw_all_experts()
    _run_gated_delta_nets()


class Norm(torch.nn.RMSNorm):
    """Stands in for Transformer Engine's RMSNorm, which knows factors of 1 + weight."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self._added = float(config.layernorm_zero_centered_gamma)
        torch.nn.init.constant_(self.weight, 1 - self._added)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] of the same type."""
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight + self._added, self.eps)


def _run_gated_delta_nets() -> None:
    """Give gated delta nets a norm of heads in fla's place, and stacks one behind their layers; Megatron-Core has such
    layers since 0.19."""
    try:
        from megatron.core.models.hybrid import hybrid_block
        from megatron.core.ssm.gated_delta_net import common
    except ImportError:
        return
    common.HAVE_FLA, common.l2norm, hybrid_block.TENorm = True, _unit_heads, Norm


def _unit_heads(heads: torch.Tensor) -> torch.Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)


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
