"""The kernel of torch's own FlashAttention-2, which needs only a CUDA build of torch; in float16 and bfloat16.

The operators are ``aten::_flash_attention_forward`` and ``…_backward``, over sequences of different lengths. They align
causal masks at the end of the keys, as attention tasks need: a task's last query sees all of its keys.
"""

from __future__ import annotations

import torch

from distca.attention.kernel import TaskBatch
from distca.plan.kinds import AttentionKind


class TorchFlashKernel:
    """aten's variable-length flash attention."""

    name = "torch"

    def forward(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, batch: TaskBatch, kind: AttentionKind
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            q_THD,
            k_SGD,
            v_SGD,
            batch.cu_q,
            batch.cu_kv,
            batch.max_q,
            batch.max_kv,
            0.0,
            batch.causal,
            False,
            scale=kind.scale,
            window_size_left=kind.window - 1 if kind.window else None,
            window_size_right=0 if kind.window else None,
        )
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
        # The operator takes the random state of dropout, which is not used here.
        unused = torch.empty(2, dtype=torch.uint64, device=q_THD.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            do_THD.contiguous(),
            q_THD,
            k_SGD,
            v_SGD,
            o_THD,
            lse_TH.t().contiguous(),
            batch.cu_q,
            batch.cu_kv,
            batch.max_q,
            batch.max_kv,
            0.0,
            batch.causal,
            unused,
            unused,
            scale=kind.scale,
            window_size_left=kind.window - 1 if kind.window else None,
            window_size_right=0 if kind.window else None,
        )
        return dq, dk, dv
