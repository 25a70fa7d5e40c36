"""What ``distca profile`` measures with Transformer Engine."""

from __future__ import annotations

import pytest
import torch

from distca.plan import AttentionShape
from distca.profile.linear_fp8 import measure_fp8
from megatron_patches.te.installed import why_not_supported

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not_supported() is not None, reason=str(why_not_supported())),
]


@pytest.mark.alone
def test_linear_layers_of_8b_are_faster_in_fp8() -> None:
    from distca.commands.profile import fp8_scalings

    device = torch.device("cuda", 0)
    scalings = fp8_scalings(device)
    if not scalings:
        pytest.skip("this GPU has no FP8")
    found = measure_fp8(AttentionShape(32, 8, 128), 4096, 14336, device=device, scalings=scalings)
    assert list(found) == scalings
    # Twice the rate, less what quantising takes.
    assert all(0.45 < factor < 0.95 for factor in found.values()), found


def test_widths_that_fp8_does_not_take_are_left_out() -> None:
    shape = AttentionShape(2, 1, 8)
    assert measure_fp8(shape, 24, 64, device=torch.device("cuda", 0), scalings=["current"]) == {}
