"""The fused rotation of q and k in megatron-core's own layers, where attention stays at home.

megatron's layers ask Transformer Engine for it (``fused_single_qkv_rope``), which few have installed. In its place they
get the kernel that disaggregated layers run, so that all modes rotate alike.
"""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig, attention

from distca.ops.rotary import Rotation, split_and_rotate

_KEPT = "distca_rotation"


def fuse_rotation(config: TransformerConfig) -> None:
    """Let the layers that are built with ``config`` split their QKV projection and rotate q and k in one pass."""
    attention.apply_fused_qkv_rotary_pos_emb = _split_and_rotate
    attention.HAVE_FUSED_QKV_ROPE = True
    config.fused_single_qkv_rope = True


def _split_and_rotate(
    mixed: torch.Tensor, angles: torch.Tensor, _: torch.Tensor, sizes: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of one layer, as megatron's layers call for them.

    Args:
        mixed: [rows, 1, groups, (heads / groups + 2) x head_dim].
        angles: [rows, 1, 1, head_dim], the same of q and of k.
        sizes: columns of q, k and v in a group.

    Returns:
        [rows, 1, heads, head_dim], and twice [rows, 1, groups, head_dim].
    """
    # Cosines and sines are those of all layers; they live as long as the micro-batch's angles.
    rotation = getattr(angles, _KEPT, None)
    if rotation is None:
        rotation = Rotation.of(angles)
        setattr(angles, _KEPT, rotation)
    assert sum(sizes) == mixed.shape[3]
    q_NHD, kv_N2GD = split_and_rotate(mixed.flatten(1), rotation, mixed.shape[2])
    k_NGD, v_NGD = kv_N2GD.unbind(1)  # backward puts both gradients together at once
    return q_NHD[:, None], k_NGD[:, None], v_NGD[:, None]
