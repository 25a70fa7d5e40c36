"""Seconds per token of one layer's linear parts: its four matrix products, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from distca.device.clock import Clock
from distca.plan import AttentionShape
from distca.profile.timing import median_seconds


def sizes_of(shape: AttentionShape, hidden: int, ffn: int) -> list[tuple[int, int]]:
    """Widths of what goes in and comes out: q,k,v and output projection, gate with up, and down projection."""
    attention = shape.heads * shape.head_dim
    return [
        (hidden, attention + 2 * shape.kv_heads * shape.head_dim),
        (attention, hidden),
        (hidden, 2 * ffn),
        (ffn, hidden),
    ]


def measure_linear(
    shape: AttentionShape, hidden: int, ffn: int, *, tokens: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Time q,k,v and output projection, gate with up, and down projection on ``tokens`` rows.

    Norms, rotary embedding, activation and residuals are left out: they are bound by memory, not by these sizes.

    Returns:
        ``hidden``, ``ffn``, ``tokens``, ``forward_s_per_token`` and ``backward_s_per_token`` of one layer.
    """
    sizes = sizes_of(shape, hidden, ffn)
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, device=device, dtype=dtype).normal_(generator=generator)

    inputs = [matrix(tokens, width) for width, _ in sizes]
    weights = [matrix(out, width) for width, out in sizes]
    gradients = [matrix(tokens, out) for _, out in sizes]

    def forward() -> None:
        for x, weight in zip(inputs, weights, strict=True):
            x @ weight.t()

    def backward() -> None:
        for x, weight, gradient in zip(inputs, weights, gradients, strict=True):
            gradient @ weight
            gradient.t() @ x

    clock = Clock(device)
    took = []
    for work in (forward, backward):
        for _ in range(10 if clock.on_gpu else 1):
            work()
        took.append(median_seconds(work, clock, 5) / tokens)
    return {
        "hidden": hidden,
        "ffn": ffn,
        "tokens": tokens,
        "forward_s_per_token": took[0],
        "backward_s_per_token": took[1],
    }
