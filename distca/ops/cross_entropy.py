"""The elementwise part of the cross-entropy, over the logits of some rows.

With tensor parallelism a rank has the logits of its share of the vocabulary; ``output_loss.py`` calls this and combines
the ranks' results. N rows, V columns of this rank's share. Everything is added up in at least float32.
"""

from __future__ import annotations

import torch

from distca.ops.triton import has_kernels


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of ``dtype`` are added up: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def row_statistics(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reduces each row of logits to three numbers.

    Args:
        logits_NV: this rank's logits.
        targets_N: int64 column of each row's target; below 0, or V and more, if the target is on another rank.

    Returns:
        [N] each, float32 or float64: the row's maximum, the sum of exp(logit − maximum), and the target's logit. The
        last is 0 if the target is on another rank.
    """
    if has_kernels(logits_NV, "cross-entropy"):
        from distca.ops.triton import cross_entropy as kernels

        return kernels.row_statistics(logits_NV, targets_N)
    logits_NV = logits_NV.to(wide(logits_NV.dtype))
    maximum_N = logits_NV.amax(1)
    here_N = (targets_N >= 0) & (targets_N < logits_NV.shape[1])
    target_N = logits_NV.gather(1, targets_N.where(here_N, 0)[:, None])[:, 0].where(here_N, 0)
    return maximum_N, (logits_NV - maximum_N[:, None]).exp_().sum(1), target_N


def logits_to_gradient_(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, lse_N: torch.Tensor, weights_N: torch.Tensor
) -> None:
    """Replaces logits by the gradient of the weighted sum of the rows' losses.

    Args:
        logits_NV: this rank's logits; overwritten.
        targets_N: as in :func:`row_statistics`.
        lse_N: logarithm of the sum of exponentials over the whole vocabulary, float32 or float64.
        weights_N: weight of each row's loss, of the same dtype.
    """
    if has_kernels(logits_NV, "cross-entropy"):
        from distca.ops.triton import cross_entropy as kernels

        return kernels.logits_to_gradient_(logits_NV, targets_N, lse_N, weights_N)
    gradient_NV = (logits_NV - lse_N[:, None]).exp_()
    columns = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    gradient_NV -= (columns == targets_N[:, None]).to(gradient_NV.dtype)
    logits_NV.copy_(gradient_NV.mul_(weights_N[:, None]))
