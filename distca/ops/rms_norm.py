"""RMSNorm: x / √(mean of x² + epsilon) × weight over the last dimension (Zhang & Sennrich 2019)."""

from __future__ import annotations

import torch

from distca.ops.triton import has_kernels


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Returns the norm [..., columns] in the dtype of ``x``; the kernel for GPUs computes in float32 and rounds once.

    Args:
        x: [..., columns].
        weight: [columns], in the dtype of ``x`` or a wider one.
        epsilon: added to the mean of squares.
    """
    if has_kernels(x, "RMSNorm"):
        from distca.ops.triton import rms_norm as kernels

        return kernels.rms_norm(x, weight, epsilon)
    return _plain(x, weight, epsilon)


def add_rms_norm(
    x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a sum and its norm. On GPUs one kernel computes both, and another one their gradients.

    Args:
        x: [..., columns], the residual stream.
        branch: the output that is added to it, in the same shape and dtype; None for nothing.
        weight: as in :func:`rms_norm`.
        epsilon: as in :func:`rms_norm`.

    Returns:
        x + branch, rounded to its dtype, and the norm of this rounded sum.
    """
    if has_kernels(x, "RMSNorm"):
        from distca.ops.triton import rms_norm as kernels

        return kernels.add_rms_norm(x, branch, weight, epsilon)
    total = x if branch is None else x + branch
    return total, _plain(total, weight, epsilon)


def fill_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
    """Writes the result of :func:`rms_norm` to ``out``, which is contiguous, without autograd."""
    if has_kernels(x, "RMSNorm"):
        from distca.ops.triton import rms_norm as kernels

        kernels.fill(x.contiguous(), weight, epsilon, out)
    else:
        out.copy_(_plain(x, weight, epsilon))


def _plain(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The norm by torch."""
    return torch.nn.functional.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, epsilon).to(x.dtype)
