"""RMSNorm for megatron's spec without Transformer Engine: the wrapped torch norm refuses sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from distca.ops.rms_norm import fill_rms_norm, rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """:func:`distca.ops.rms_norm.rms_norm`, built the way megatron builds norms. On GPUs one kernel each for forward
    and backward, which computes in float32 and rounds once.

    Under sequence parallelism each tensor-parallel rank normalises its own tokens; the mark on the weight makes
    megatron add up the weight's gradient over these ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] of the same type."""
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)

    def fill(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write what :meth:`forward` returns for ``x`` into ``out``, without autograd."""
        assert self.eps is not None
        fill_rms_norm(x, self.weight, self.eps, out)
