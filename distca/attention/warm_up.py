"""Compiling a kernel before the first step needs it."""

from __future__ import annotations

import numpy as np
import torch

from distca.attention.kernel import Kernel, TaskBatch


def warm_up(kernel: Kernel, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Run forward and backward once on a few rows, so that a kernel that is compiled when it is first used is compiled
    now and not while other ranks wait for its rows.

    Args:
        kernel: the kernel.
        heads: query heads of this rank.
        kv_heads: key/value heads of this rank.
        head_dim: elements per head.
        dtype: of the rows.
        device: where they live.
    """
    rows = 256
    batch = TaskBatch.of(np.array([0, rows // 2, rows]), np.array([0, rows // 2, 2 * rows]), device)
    q = torch.zeros(rows, heads, head_dim, dtype=dtype, device=device)
    # Keys and values lie beside each other, as they travel.
    kv = torch.zeros(2 * rows, 2, kv_heads, head_dim, dtype=dtype, device=device)
    o, lse = kernel.forward(q, kv[:, 0], kv[:, 1], batch, head_dim**-0.5)
    kernel.backward(torch.zeros_like(o), q, kv[:, 0], kv[:, 1], o, lse, batch, head_dim**-0.5)
