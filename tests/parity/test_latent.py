"""Multi-head latent attention, whose values are narrower than its keys, against unmodified megatron-core on one
document at a time."""

import pytest
import torch

from distca.testing.ranks import run_ranks
from megatron_patches.versions import has_gated_delta_net
from tests.parity.test_parity import _check, _suite

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_gated_delta_net(), reason="Latent attention is served with Megatron-Core 0.19"),
]


def _loss_and_gradients(first):
    suite = _suite()
    from distca.parity.latent import latent_cases

    cases = latent_cases()[first::2]
    differences = suite.float32_differences(cases, torch.device("cpu"))
    return [(case, found, suite.FLOAT32_TOLERANCE) for case, found in zip(cases, differences, strict=True)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_loss_and_every_gradient(ranks):
    """Each half of the cases has keep and resend, RoPE and YaRN."""
    _check(run_ranks(ranks, _loss_and_gradients, ranks // 4)[0])
