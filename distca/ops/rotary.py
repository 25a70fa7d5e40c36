"""The rotation of q and k by their positions, in one pass with the split of the QKV projection.

Shapes: N rows, F = (H + 2G)·D columns of a QKV projection, H query heads, G key/value heads; D head_dim, E pairs that
are turned in a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from distca.ops.triton import has_kernels


@dataclass(frozen=True)
class Rotation:
    """How the rows of one nano-batch are turned by their positions, in one layer or in several.

    Attributes:
        cos_NE: float32.
        sin_NE: float32.
        passed: the last dimensions of each head, which stay as they are.
        interleaved: a pair is two neighbours; otherwise it is the same place in both halves of what is rotated.
        query_scale_N: factor of each row's query, float32; None where queries are not scaled by their position.
    """

    cos_NE: torch.Tensor
    sin_NE: torch.Tensor
    passed: int = 0
    interleaved: bool = False
    query_scale_N: torch.Tensor | None = None

    @staticmethod
    def of(angles: torch.Tensor, head_dim: int | None = None, interleaved: bool = False) -> Rotation:
        """Returns the rotation by [rows, 1, 1, dims] angles, each of which is there for both numbers of its pair.

        Args:
            angles: of the first ``dims`` dimensions of a head.
            head_dim: width of a head; None where all of it is rotated.
            interleaved: the angles of a pair are neighbours.
        """
        dims = angles.shape[-1]
        each = angles[:, 0, 0, ::2] if interleaved else angles[:, 0, 0, : dims // 2]
        return Rotation(each.cos(), each.sin(), (head_dim or dims) - dims, interleaved)

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return 2 * self.cos_NE.shape[1] + self.passed

    @property
    def has_kernel(self) -> bool:
        """Whether the kernels for GPUs know this kind of rotation."""
        return not self.passed and not self.interleaved


def split_and_rotate(mixed_NF: torch.Tensor, rotation: Rotation, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a QKV projection as megatron lays it out and rotate q and k by their positions.

    Args:
        mixed_NF: for each group its query heads, its key and its value.
        rotation: of the same rows.
        groups: key/value heads.

    Returns:
        q_NHD and kv_N2GD, differentiable with regard to mixed_NF. On GPUs one kernel reads and writes every number
        once, and computes in float32; rotations of a part of each head and interleaved ones have none.
    """
    if rotation.has_kernel and has_kernels(mixed_NF, "rotation"):
        from distca.ops.triton import rotary as kernels

        q_NHD, kv_N2GD = kernels.split_and_rotate(mixed_NF, rotation.cos_NE, rotation.sin_NE, groups)
    else:
        heads = mixed_NF.unflatten(1, (groups, -1, rotation.head_dim))
        turn = _turn_by(rotation, mixed_NF.dtype)
        q_NHD = turn(heads[:, :, :-2].flatten(1, 2))
        kv_N2GD = torch.stack((turn(heads[:, :, -2]), heads[:, :, -1]), dim=1)
    if rotation.query_scale_N is not None:
        q_NHD = q_NHD * rotation.query_scale_N.to(q_NHD.dtype)[:, None, None]
    return q_NHD, kv_N2GD


def _turn_by(rotation: Rotation, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns what turns [rows, heads, head_dim] of a type."""
    cos_N1E, sin_N1E = (x.to(dtype)[:, None] for x in (rotation.cos_NE, rotation.sin_NE))

    def turn(x_NHD: torch.Tensor) -> torch.Tensor:
        turned, passed = x_NHD.split([x_NHD.shape[-1] - rotation.passed, rotation.passed], dim=-1)
        if rotation.interleaved:
            first, second = turned[..., ::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, dim=-1)
        both = first * cos_N1E - second * sin_N1E, second * cos_N1E + first * sin_N1E
        turned = torch.stack(both, dim=-1).flatten(-2) if rotation.interleaved else torch.cat(both, dim=-1)
        return torch.cat((turned, passed), dim=-1) if rotation.passed else turned

    return turn
