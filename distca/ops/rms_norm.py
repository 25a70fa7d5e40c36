"""RMSNorm: x / √(mean of x² + epsilon) × weight over the last dimension (Zhang & Sennrich 2019)."""

from __future__ import annotations

import torch

from distca.ops.triton import has_kernels


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """[..., columns] of the type of ``x``; on GPUs computed in float32 and rounded once.

    Args:
        x: [..., columns].
        weight: [columns] of the type of ``x`` or of a wider one.
        epsilon: is added to the mean of squares.
    """
    if has_kernels(x, "RMSNorm"):
        from distca.ops.triton import rms_norm as kernels

        return kernels.rms_norm(x, weight, epsilon)
    return _plain(x, weight, epsilon)


def fill_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
    """Write what :func:`rms_norm` returns into ``out``, which is contiguous, without autograd."""
    if has_kernels(x, "RMSNorm"):
        from distca.ops.triton import rms_norm as kernels

        kernels.fill(x.contiguous(), weight, epsilon, out)
    else:
        out.copy_(_plain(x, weight, epsilon))


def _plain(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, epsilon).to(x.dtype)
