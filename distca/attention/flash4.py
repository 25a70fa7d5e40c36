"""The kernel of flash-attn-4 (CuTe DSL), for Hopper and Blackwell GPUs, in float16 and bfloat16.

flash-attn-4's public functions are autograd functions. A task's forward and backward may run on different ranks, so the
plain functions below them are called. These are private, so pyproject.toml pins the version.
"""

from __future__ import annotations

import os

import torch

from distca.attention.kernel import TaskBatch
from distca.plan.kinds import AttentionKind


class Flash4Kernel:
    """flash-attn-4's variable-length forward and backward.

    Args:
        deterministic: whether gradients must be bitwise equal from run to run, which is slower.

    Raises:
        ImportError: flash-attn-4 is not installed.
    """

    name = "flash4"

    def __init__(self, deterministic: bool = False) -> None:
        # Kernels are compiled when they are first used, which takes about 20 s. Later starts find them on disk.
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

        self._forward, self._backward = _flash_attn_fwd, _flash_attn_bwd
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


def _rows_before(kind: AttentionKind) -> int | None:
    """The number of keys before its own that a query sees; None for all."""
    return kind.window - 1 if kind.window else None
