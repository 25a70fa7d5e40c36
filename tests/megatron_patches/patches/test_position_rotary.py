"""Angles of positions against those of megatron's rotary embedding, which knows whole sequences only."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from distca.errors import SupportError
from distca.models.rope import RopeScaling
from megatron_patches.patches.position_rotary import PositionRotary, use_position_rotary


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
    ours = use_position_rotary(SimpleNamespace(rotary_pos_emb=rotary))
    ours.set_positions(positions)
    assert torch.equal(ours(0)[:, 0, 0], torch.cat((half, half), dim=-1)[positions])
    assert torch.equal(positions.sort().values, positions.unique()), "positions stay as they are"


def test_dynamic_angles_are_those_of_every_rows_own_document():
    scaling = RopeScaling(kind="dynamic", factor=2.0, original_length=16)
    positions, lengths = torch.tensor([3, 3, 3]), torch.tensor([5, 16, 40])
    rotary = PositionRotary.of(8, 100.0, scaling)
    assert rotary.needs_lengths
    rotary.set_positions(positions, lengths)
    short, at_most, long = rotary(0)[:, 0, 0]
    assert torch.equal(short, at_most) and short[0] == long[0] == 3 and (short[1:4] > long[1:4]).all()
    with pytest.raises(SupportError, match="scaled by the length of each document"):
        rotary.set_positions(positions)


def test_an_embedding_by_position_is_kept():
    model = SimpleNamespace(rotary_pos_emb=PositionRotary.of(8, 100.0, RopeScaling(kind="linear", factor=2.0)))
    before = model.rotary_pos_emb
    assert use_position_rotary(model) is before is model.rotary_pos_emb and not before.needs_lengths
