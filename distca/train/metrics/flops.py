"""Floating-point operations of the model, counted by formula, and the share of the device's peak they reach.

Only the model's own work counts: recomputation and attention's own backward recomputation do not. A multiplication and
an addition are two operations. Attention is causal inside each document, so a document of l tokens has l(l+1)/2 pairs
of query and key. A batch's attention grows with the sum of squared document lengths (arXiv 2510.18121, section 2). In a
layer with a window w a document has the pairs inside it alone, l·w - w(w-1)/2 where it is longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.models.shape import ModelShape
from distca.plan.geometry import pairs

# Dense peaks without sparsity, FLOP/s per device, in bfloat16 and in FP8 (0: it has none), from the vendor's data
# sheets. The first name that occurs in the device's name counts, so the narrower names come first.
_PEAKS = (
    ("H100 PCIe", 756e12, 1513e12),
    ("H100 NVL", 835e12, 1671e12),
    ("H200 NVL", 835e12, 1671e12),
    ("H100", 989e12, 1979e12),
    ("H200", 989e12, 1979e12),
    ("A100", 312e12, 0.0),
)


@dataclass(frozen=True)
class ModelFlops:
    """Operations of one step, forward and backward, over the whole global batch.

    Attributes:
        linear: of the projections and the MLPs, 6 per weight and token.
        logits: of the output layer.
        attention: of QKᵀ and PV.
        recurrent: of recurrent cores, one row after the other, with their convolutions.
    """

    linear: int
    logits: int
    attention: int
    recurrent: int = 0

    @property
    def total(self) -> int:
        return self.linear + self.logits + self.attention + self.recurrent


def model_flops(model: ModelShape, vocabulary: int, lengths: Sequence[int] | np.ndarray) -> ModelFlops:
    """Operations of one training step.

    Args:
        model: the model.
        vocabulary: rows of the output layer.
        lengths: [D] tokens of every document of the global batch.
    """
    length = np.asarray(lengths, dtype=np.int64)
    tokens = int(length.sum())
    seen = sum(layers * _pairs(length, window) for window, layers in Counter(model.windows).items())
    return ModelFlops(
        linear=6 * model.matmul_weights * tokens,
        logits=6 * model.hidden * vocabulary * tokens,
        # QKᵀ and PV: 2 operations per pair and element each; the backward pass does twice the work of the forward pass.
        attention=3 * 2 * model.heads * (model.resolved_head_dim + model.value_dim) * seen,
        recurrent=3 * sum(model.hybrid.recurrence(each).operations for each in model.recurrent_layers) * tokens,
    )


def _pairs(lengths: np.ndarray, window: int) -> int:
    """Pairs of query and key in a layer whose queries see ``window`` keys; 0 for all."""
    # Those of one document are exact in float64; Python integers add them up without overflow.
    return sum(map(int, pairs(lengths, lengths, window).tolist()))


def peak_seconds(flops: ModelFlops, device_name: str, precision: str, fp8: str) -> float | None:
    """Seconds of one device for these operations at its peaks: linear layers at that of FP8 where they compute in it,
    the output layer and attention at that of bfloat16. None where no peak is known: on CPUs, other devices, in fp32.

    Args:
        flops: the operations.
        device_name: as torch names the device.
        precision: "bf16" or "fp32".
        fp8: "none", or how the linear layers' tensors are scaled to FP8.
    """
    if precision != "bf16":
        return None
    for name, bfloat16, float8 in _PEAKS:
        if name in device_name:
            linear = float8 if fp8 != "none" else bfloat16
            return flops.linear / linear + (flops.total - flops.linear) / bfloat16 if linear else None
    return None


def mfu(at_peak: float | None, seconds: float, gpus: int) -> float | None:
    """Share of the peak of ``gpus`` devices that work reaches in ``seconds`` for which one device at its peak takes
    ``at_peak`` seconds; None where the peak is not known."""
    return None if at_peak is None else at_peak / (seconds * gpus)
