"""The fused rotation in megatron-core's own layers, against megatron's own."""

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.transformer import TransformerConfig, attention

from distca.testing.reference_attention import relative_error
from megatron_patches.patches import fused_ops as fused_rope
from megatron_patches.patches.fused_ops import fuse_rotation


@pytest.mark.parametrize("rows, heads, groups, dim", [(7, 4, 2, 8), (1, 3, 3, 4), (0, 4, 1, 8)])
def test_the_same_q_k_and_v_as_from_megatron(monkeypatch, rows, heads, groups, dim):
    for name in ("apply_fused_qkv_rotary_pos_emb", "HAVE_FUSED_QKV_ROPE"):
        monkeypatch.setattr(attention, name, getattr(attention, name, None), raising=False)
    config = TransformerConfig(num_layers=1, hidden_size=heads * dim, num_attention_heads=heads)
    fuse_rotation(config)
    assert config.fused_single_qkv_rope and attention.HAVE_FUSED_QKV_ROPE

    torch.manual_seed(0)
    sizes = [heads // groups * dim, dim, dim]
    mixed = torch.randn(rows, 1, groups, sum(sizes), dtype=torch.float64, requires_grad=True)
    half = torch.outer(torch.arange(rows) * 3.0, torch.rand(dim // 2)).double()
    angles = torch.cat((half, half), dim=-1)[:, None, None]
    computed = []
    of = fused_rope.Rotation.of
    monkeypatch.setattr(fused_rope.Rotation, "of", lambda *x: computed.append(1) or of(*x))
    for _ in range(2):  # layers
        found = attention.apply_fused_qkv_rotary_pos_emb(mixed, angles, angles, sizes)
    assert len(computed) == 1, "cosines and sines are those of all layers"

    q, k, v = torch.split(mixed, sizes, dim=3)
    q = q.reshape(rows, 1, heads, dim)
    expected = [_apply_rotary_pos_emb_bshd(q, angles), _apply_rotary_pos_emb_bshd(k, angles), v]
    weights = [torch.randn_like(x) for x in expected]
    gradients = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)), mixed)[0]
        for outputs in (found, expected)
    ]
    for one, other in [*zip(found, expected, strict=True), gradients]:
        assert one.shape == other.shape
        assert not rows or relative_error(one, other) < 1e-14
