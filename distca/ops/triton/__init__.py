"""Triton kernels for the elementwise work at home; imported on GPUs only, everything has a plain torch version too."""

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
    "expert sums",
    "convolution",
    "gradients within chunks",
]
"""The operations that are fused and have a plain version."""

_refused: set[Operation] = set()


def has_kernels(x: torch.Tensor, operation: Operation) -> bool:
    """Whether an operation's kernels serve this tensor: on a GPU, not float64, and not refused here."""
    return x.is_cuda and x.dtype != torch.float64 and is_trusted(operation)


def is_trusted(operation: Operation) -> bool:
    """Whether nobody refused an operation's kernels in this process."""
    return operation not in _refused


def refuse(operation: Operation) -> None:
    """Let an operation's plain version run in this process from now on, as its kernels are wrong here."""
    _refused.add(operation)
