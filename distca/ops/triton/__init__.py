"""Triton kernels of fused operations. Its files are imported on GPUs only; each operation has a plain torch version."""

from __future__ import annotations

from typing import Literal

import torch

Operation = Literal[
    "rotation",
    "SwiGLU",
    "RMSNorm",
    "cross-entropy",
    "weight gradients",
    "row sums",
    "router products",
    "expert numbers",
    "expert sums",
    "expert gradients",
    "bias gradients",
    "convolution",
    "gradients within chunks",
]
"""The names of fused operations. "weight gradients" and "router products" are products of torch, not of Triton."""

_refused: set[Operation] = set()
"""The operations whose kernels failed their check, on this rank or on another one."""


def has_kernels(x: torch.Tensor, operation: Operation) -> bool:
    """Whether an operation's kernels compute this tensor: it is on a GPU and not float64, and they are not refused."""
    return x.is_cuda and x.dtype != torch.float64 and is_trusted(operation)


def is_trusted(operation: Operation) -> bool:
    """Whether an operation's kernels are not refused in this process."""
    return operation not in _refused


def refuse(operation: Operation) -> None:
    """Lets the plain version of an operation run in this process from now on, since its kernels failed their check."""
    _refused.add(operation)
