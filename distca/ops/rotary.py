"""The rotation of q and k by their positions, in one pass with the split of the QKV projection.

Shapes: N rows, F = (H + 2G)·D columns of a QKV projection, H query heads, G key/value heads, D head_dim, E = D/2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distca.ops.triton import has_kernels


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the rows of one nano-batch, for all layers.

    Attributes:
        cos_NE: float32.
        sin_NE: float32.
    """

    cos_NE: torch.Tensor
    sin_NE: torch.Tensor

    @staticmethod
    def of(angles: torch.Tensor) -> Rotation:
        """Of [rows, 1, 1, head_dim] angles, whose two halves are the same."""
        half = angles[:, 0, 0, : angles.shape[-1] // 2]
        return Rotation(half.cos(), half.sin())


def split_and_rotate(mixed_NF: torch.Tensor, rotation: Rotation, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a QKV projection as megatron lays it out and rotate q and k by their positions.

    Args:
        mixed_NF: for each group its query heads, its key and its value.
        rotation: of the same rows.
        groups: key/value heads.

    Returns:
        q_NHD and kv_N2GD, differentiable with regard to mixed_NF. On GPUs one kernel reads and writes every number
        once, and computes in float32.
    """
    if has_kernels(mixed_NF, "rotation"):
        from distca.ops.triton import rotary as kernels

        return kernels.split_and_rotate(mixed_NF, rotation.cos_NE, rotation.sin_NE, groups)
    cos_N1E, sin_N1E = (x.to(mixed_NF.dtype)[:, None] for x in (rotation.cos_NE, rotation.sin_NE))
    heads = mixed_NF.unflatten(1, (groups, -1, 2 * rotation.cos_NE.shape[1]))
    q_NHD, k_NGD, v_NGD = heads[:, :, :-2].flatten(1, 2), heads[:, :, -2], heads[:, :, -1]
    return _rotated(q_NHD, cos_N1E, sin_N1E), torch.stack((_rotated(k_NGD, cos_N1E, sin_N1E), v_NGD), dim=1)


def _rotated(x_NHD: torch.Tensor, cos_N1E: torch.Tensor, sin_N1E: torch.Tensor) -> torch.Tensor:
    first, second = x_NHD.chunk(2, dim=-1)
    return torch.cat((first * cos_N1E - second * sin_N1E, second * cos_N1E + first * sin_N1E), dim=-1)
