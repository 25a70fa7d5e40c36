"""Triton kernels for the elementwise work at home; imported on GPUs only, everything has a plain torch version too."""

from __future__ import annotations

import torch


def has_kernels(x: torch.Tensor) -> bool:
    """Whether the kernels serve this tensor: on a GPU, and not float64."""
    return x.is_cuda and x.dtype != torch.float64
