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


def add_rms_norm(
    x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum and its norm, in one pass on GPUs, which also adds both gradients in one pass.

    Args:
        x: [..., columns], the residual stream.
        branch: what is added to it, of the same shape and type; None for nothing.
        weight: as for :func:`rms_norm`.
        epsilon: likewise.

    Returns:
        x + branch, and what :func:`rms_norm` returns for that sum as it is rounded to its type.
    """
    if has_kernels(x, "RMSNorm"):
        from distca.ops.triton import rms_norm as kernels

        return kernels.add_rms_norm(x, branch, weight, epsilon)
    total = x if branch is None else x + branch
    return total, _plain(total, weight, epsilon)


def fill_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
    """Write what :func:`rms_norm` returns into ``out``, which is contiguous, without autograd."""
    if has_kernels(x, "RMSNorm"):
        from distca.ops.triton import rms_norm as kernels

        kernels.fill(x.contiguous(), weight, epsilon, out)
    else:
        out.copy_(_plain(x, weight, epsilon))


def _plain(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, epsilon).to(x.dtype)
