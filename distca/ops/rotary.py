"""The rotation of q and k by their positions (RoPE), in one pass with the split of the QKV projection and heads' norms.

RoPE turns *pairs* of a head's numbers by angles that depend on the position. N rows; F = (H + 2G)·D columns of a QKV
projection; H query heads, G key/value heads, D head dimension; E pairs of a head that are turned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from distca.ops.rms_norm import rms_norm
from distca.ops.triton import has_kernels


class HeadNorms(NamedTuple):
    """RMSNorms of each head of q and of k, before these are turned.

    Attributes:
        query_D: factors of queries, in the dtype of the projection or a wider one.
        key_D: factors of keys, likewise.
        epsilon: added to the mean of squares.
    """

    query_D: torch.Tensor
    key_D: torch.Tensor
    epsilon: float


@dataclass(frozen=True)
class Rotation:
    """The rotation of some rows, for all layers with the same angles.

    Attributes:
        cos_NE: float32 cosines of the angles.
        sin_NE: float32 sines of the angles.
        passed: number of each head's last elements that are not turned.
        interleaved: whether a pair is two neighbours. Otherwise it is element i of the first half and element i of the
            second half of the elements that are turned.
        query_scale_N: float32 factor on each row's query; None if queries are not scaled by their position.
    """

    cos_NE: torch.Tensor
    sin_NE: torch.Tensor
    passed: int = 0
    interleaved: bool = False
    query_scale_N: torch.Tensor | None = None

    @staticmethod
    def of(angles: torch.Tensor, head_dim: int | None = None, interleaved: bool = False) -> Rotation:
        """Makes the rotation from Megatron's angles.

        Args:
            angles: [rows, 1, 1, dims] of the first ``dims`` elements of a head; both elements of a pair have the same.
            head_dim: elements of a head; None if all are turned.
            interleaved: whether a pair is two neighbours.
        """
        dims = angles.shape[-1]
        each = angles[:, 0, 0, ::2] if interleaved else angles[:, 0, 0, : dims // 2]
        return Rotation(each.cos(), each.sin(), (head_dim or dims) - dims, interleaved)

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return 2 * self.cos_NE.shape[1] + self.passed

    @property
    def has_kernel(self) -> bool:
        """Whether the Triton kernel can compute this rotation: it turns whole heads, and pairs are not neighbours."""
        return not self.passed and not self.interleaved


def split_and_rotate(
    mixed_NF: torch.Tensor, rotation: Rotation, groups: int, norms: HeadNorms | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits a QKV projection in Megatron's layout, normalises heads of q and k, and rotates them.

    Args:
        mixed_NF: the projection's output: for each key/value head its query heads, the key and the value.
        rotation: the rotation of these rows.
        groups: number of key/value heads.
        norms: of the heads; None for no norms.

    Returns:
        q_NHD and kv_N2GD, differentiable with respect to mixed_NF and factors. On GPUs one kernel reads and writes
        every number once, and computes in float32, if it can compute this rotation.
    """
    if rotation.has_kernel and has_kernels(mixed_NF, "rotation"):
        from distca.ops.triton import rotary as kernels

        q_NHD, kv_N2GD = kernels.split_and_rotate(mixed_NF, rotation.cos_NE, rotation.sin_NE, groups, norms)
    else:
        heads = mixed_NF.unflatten(1, (groups, -1, rotation.head_dim))
        turn = _turn_by(rotation, mixed_NF.dtype)
        q_NHD, k_NGD, v_NGD = heads[:, :, :-2].flatten(1, 2), heads[:, :, -2], heads[:, :, -1]
        if norms is not None:
            q_NHD = rms_norm(q_NHD, norms.query_D, norms.epsilon)
            k_NGD = rms_norm(k_NGD, norms.key_D, norms.epsilon)
        q_NHD = turn(q_NHD)
        kv_N2GD = torch.stack((turn(k_NGD), v_NGD), dim=1)
    if rotation.query_scale_N is not None:
        q_NHD = q_NHD * rotation.query_scale_N.to(q_NHD.dtype)[:, None, None]
    return q_NHD, kv_N2GD


def _turn_by(rotation: Rotation, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that turns [rows, heads, head_dim] of the ``dtype``, in torch."""
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
