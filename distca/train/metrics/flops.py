"""Floating-point operations of the model, counted by formula, and the share of the device's peak they reach.

Only the model's own work counts: recomputation and attention's own backward recomputation do not. A multiplication and
an addition are two operations. Attention is causal inside each document, so a document of l tokens has l(l+1)/2 pairs
of query and key, and a batch's attention grows with the sum of squared document lengths (arXiv 2510.18121, section 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.train.config.schema import ModelConfig

# Dense bfloat16 peak without sparsity, FLOP/s per device, from the vendor's data sheets. The first name that occurs in
# the device's name counts, so the narrower names come first.
_BF16_PEAKS = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H200 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("A100", 312e12),
)


@dataclass(frozen=True)
class ModelFlops:
    """Operations of one step, forward and backward, over the whole global batch.

    Attributes:
        linear: of the projections and the MLPs, 6 per weight and token.
        logits: of the output layer.
        attention: of QKᵀ and PV.
    """

    linear: int
    logits: int
    attention: int

    @property
    def total(self) -> int:
        return self.linear + self.logits + self.attention


def matmul_parameters(model: ModelConfig) -> int:
    """Weights of all layers that multiply tokens: q, k, v and output projections, gate, up and down. No embedding."""
    query = model.heads * model.resolved_head_dim
    key_value = model.kv_heads * model.resolved_head_dim
    return model.layers * model.hidden * (2 * query + 2 * key_value + 3 * model.ffn)


def model_flops(model: ModelConfig, vocabulary: int, lengths: Sequence[int] | np.ndarray) -> ModelFlops:
    """Operations of one training step.

    Args:
        model: the model.
        vocabulary: rows of the output layer.
        lengths: [D] tokens of every document of the global batch.
    """
    length = np.asarray(lengths, dtype=np.int64)
    tokens = int(length.sum())
    pairs = sum(n * (n + 1) // 2 for n in length.tolist())  # Python integers: no overflow
    return ModelFlops(
        linear=6 * matmul_parameters(model) * tokens,
        logits=6 * model.hidden * vocabulary * tokens,
        # QKᵀ and PV: 2 operations per pair and element each; the backward pass does twice the work of the forward pass.
        attention=3 * 4 * model.layers * model.heads * model.resolved_head_dim * pairs,
    )


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak of one device in FLOP/s, or None where none is known: on CPUs, other devices, and in fp32."""
    if precision != "bf16":
        return None
    return next((peak for name, peak in _BF16_PEAKS if name in device_name), None)


def mfu(flops: float, seconds: float, gpus: int, peak: float | None) -> float | None:
    """Share of the peak of ``gpus`` devices that ``flops`` in ``seconds`` make; None where the peak is not known."""
    return None if peak is None else flops / (seconds * gpus * peak)
