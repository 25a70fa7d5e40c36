"""The head dimensions that are served: by rotary positions in any case, and by each core-attention kernel.

Commands, settings and the choice of a kernel all ask here.
"""

from __future__ import annotations

from typing import Literal

FLASH4 = frozenset({24, 32, 56, 64, 88, 96, 120, *range(128, 257, 8)})
"""Head dimensions for which flash-attn-4 4.0.0b36 was right on H100, forward and backward, against float64. For 8, 16,
40, 48, 72, 80, 104 and 112 its backward is wrong by 100 % and more (benchmarks/results/kernel_proof.json)."""

FLASH4_FORWARD = FLASH4 | {16, 40, 48, 72, 80, 104, 112}
"""Head dimensions for which its forward was right there. The self-check holds each start against float64. For 80 on an
H200 its forward takes half the time of torch's (benchmarks/results/kernel_pair_heads_of_80.json)."""

FLASH4_NARROW = frozenset({(192, 128)})
"""Head dimensions of keys and of narrower values, with as many key/value heads as heads, for which it was right."""

_TORCH_MULTIPLE, _TORCH_MOST = 8, 256


def unserved(head_dim: int) -> str | None:
    """Returns, in words, the objection to a head dimension, whatever kernel is taken; None if there is none."""
    if head_dim < 1 or head_dim % 2:
        return f"{head_dim}, but rotary positions need an even one"
    return None


def unserved_by(
    kernel: str, head_dim: int, value_dim: int = 0, direction: Literal["forward", "backward"] = "backward"
) -> str | None:
    """Why a kernel is not taken for a head dimension, or None if it is.

    Args:
        kernel: "flash4", "torch" or "reference".
        head_dim: elements per head, of queries and keys.
        value_dim: of values, where they are narrower; 0 for ``head_dim``.
        direction: what the kernel is to compute. What is served in backward is served in forward too.
    """
    if kernel != "reference" and value_dim not in (0, head_dim):
        if kernel == "flash4" and (head_dim, value_dim) in FLASH4_NARROW:
            return None
        return f"it was not proved for keys of {head_dim} and values of {value_dim}"
    if kernel == "flash4" and head_dim not in (FLASH4 if direction == "backward" else FLASH4_FORWARD):
        return (
            f"its backward was not proved for head dimension {head_dim}, only for {', '.join(map(str, sorted(FLASH4)))}"
        )
    if kernel == "torch" and (head_dim % _TORCH_MULTIPLE or head_dim > _TORCH_MOST):
        return f"it takes head dimensions up to {_TORCH_MOST} in steps of {_TORCH_MULTIPLE}, not {head_dim}"
    return None
