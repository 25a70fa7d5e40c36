"""RMSNorm for megatron's spec without Transformer Engine: the wrapped torch norm refuses sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """x / √(mean of x² + epsilon) × weight over the last dimension (Zhang & Sennrich 2019), built the way megatron
    builds norms. On GPUs one kernel each for forward and backward, which computes in float32 and rounds once.

    Under sequence parallelism each tensor-parallel rank normalises its own tokens; the mark on the weight makes
    megatron add up the weight's gradient over these ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] of the same type."""
        if not x.is_cuda or x.dtype == torch.float64:
            return super().forward(x)
        from distca.ops.triton import rms_norm as kernels

        assert self.eps is not None
        return kernels.rms_norm(x, self.weight, self.eps)

    def fill(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write what :meth:`forward` returns for ``x`` into ``out``, without autograd."""
        if not x.is_cuda or x.dtype == torch.float64:
            out.copy_(super().forward(x))
            return
        from distca.ops.triton import rms_norm as kernels

        assert self.eps is not None
        kernels.fill(x.contiguous(), self.weight, self.eps, out)
