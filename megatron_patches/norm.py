"""RMSNorm for megatron's spec without Transformer Engine: the wrapped torch norm refuses sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, built the way megatron builds norms.

    Under sequence parallelism each tensor-parallel rank normalises its own tokens; the mark on the weight makes
    megatron add up the weight's gradient over these ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
