"""Angles of positions against those of megatron's rotary embedding, which knows whole sequences only."""

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_patches.patches.position_rotary import PositionRotary


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rotary_base": 500000, "rope_scaling": True, "rope_scaling_factor": 32.0},
        {"seq_len_interpolation_factor": 3.0},
        {"rope_scaling": True, "seq_len_interpolation_factor": 7.0},
    ],
)
def test_the_same_angles_as_megatrons(options):
    rotary = RotaryEmbedding(kv_channels=64, rotary_percent=1.0, use_cpu_initialization=True, **options)
    half = rotary.get_freqs_non_repeated(20000)
    positions = torch.randperm(20000)[:5000]
    ours = PositionRotary(rotary)
    ours.set_positions(positions)
    assert torch.equal(ours(0)[:, 0, 0], torch.cat((half, half), dim=-1)[positions])
    assert torch.equal(positions.sort().values, positions.unique()), "positions stay as they are"
