"""The kernel of flash-attn-4 (CuTe DSL), for Hopper and Blackwell GPUs, in float16 and bfloat16.

flash-attn-4's public functions are autograd functions. A task's forward and backward may run on different ranks, so the
plain functions below them are called. These are private, so pyproject.toml pins the version.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from distca.attention.kernel import TaskBatch
from distca.plan.kinds import AttentionKind

_ON_DISK = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
"""The variable by which users tell flash-attn-4 whether compiled kernels are kept on disk."""
_LOCKED_S = 120
"""Seconds that a process may wait for a compiled kernel which another one writes; flash-attn-4's own 15 s are too few
where many processes share a busy machine. A process that waits longer fails."""


class Flash4Kernel:
    """flash-attn-4's variable-length forward and backward.

    Args:
        deterministic: whether gradients must be bitwise equal from run to run, which is slower.

    Raises:
        ImportError: flash-attn-4 is not installed.
    """

    name = "flash4"

    def __init__(self, deterministic: bool = False) -> None:
        from flash_attn.cute import cache_utils, interface

        _keep_on_disk(cache_utils, interface)
        self._forward, self._backward = interface._flash_attn_fwd, interface._flash_attn_bwd
        self._deterministic = deterministic

    def forward(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, batch: TaskBatch, kind: AttentionKind
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o_THD, lse_HT, *_ = self._forward(
            q_THD,
            k_SGD,
            v_SGD,
            cu_seqlens_q=batch.cu_q,
            cu_seqlens_k=batch.cu_kv,
            max_seqlen_q=batch.max_q,
            max_seqlen_k=batch.max_kv,
            softmax_scale=kind.scale,
            causal=batch.causal,
            softcap=kind.softcap,
            window_size_left=_rows_before(kind),
            return_lse=True,
        )
        assert lse_HT is not None
        return o_THD, lse_HT.t()

    def backward(
        self,
        do_THD: torch.Tensor,
        q_THD: torch.Tensor,
        k_SGD: torch.Tensor,
        v_SGD: torch.Tensor,
        o_THD: torch.Tensor,
        lse_TH: torch.Tensor,
        batch: TaskBatch,
        kind: AttentionKind,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv = self._backward(
            q_THD,
            k_SGD,
            v_SGD,
            o_THD,
            do_THD.contiguous(),
            lse_TH.t().contiguous(),
            softmax_scale=kind.scale,
            causal=batch.causal,
            softcap=kind.softcap,
            window_size_left=_rows_before(kind),
            cu_seqlens_q=batch.cu_q,
            cu_seqlens_k=batch.cu_kv,
            max_seqlen_q=batch.max_q,
            max_seqlen_k=batch.max_kv,
            deterministic=self._deterministic,
        )
        return dq, dk, dv


def _keep_on_disk(cache_utils: Any, interface: Any) -> None:
    """Lets later starts find compiled kernels on disk, since compiling takes about 20 s; unless the user chose.

    flash-attn-4 reads its variable when it is imported. Megatron-Core 0.19 imports it, perhaps before this package is
    imported, so the variable would be set too late. Its caches are replaced instead.
    """
    cache_utils.JITPersistentCache.LOCK_TIMEOUT_SECONDS = _LOCKED_S
    if _ON_DISK in os.environ or cache_utils.CUTE_DSL_CACHE_ENABLED:
        return
    cache_utils.CUTE_DSL_CACHE_ENABLED = True
    for name, function in vars(interface).items():
        if isinstance(getattr(function, "compile_cache", None), cache_utils.JITCache):
            function.compile_cache = cache_utils.get_jit_cache(name)


def _rows_before(kind: AttentionKind) -> int | None:
    """The number of keys before its own that a query sees; None for all."""
    return kind.window - 1 if kind.window else None
