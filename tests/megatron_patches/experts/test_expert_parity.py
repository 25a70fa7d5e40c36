"""Models with experts against unmodified megatron-core, on gloo ranks."""

import pytest
import torch

from distca.testing.ranks import run_ranks
from tests.megatron_patches.small_cases import on_cpu

pytestmark = pytest.mark.slow


def _differences(tp, pp, ep, deal, every):
    on_cpu()
    from distca.parity import experts

    cases = experts.expert_cases(tp, pp, ep, deal=deal)[every]
    return list(zip(cases, experts.expert_differences(cases, torch.device("cpu")), strict=True))


@pytest.mark.parametrize(
    ("ranks", "tp", "pp", "ep", "deal", "every"),
    [
        (2, 1, 1, 2, True, slice(2, None, 2)),
        (4, 2, 1, 2, False, slice(3, None, 4)),
        (4, 1, 2, 2, False, slice(2, None, 3)),
    ],
)
def test_loss_gradients_and_biases_are_those_of_unmodified_megatron(ranks, tp, pp, ep, deal, every):
    for case, off in run_ranks(ranks, _differences, tp, pp, ep, deal, every)[0]:
        assert max(off.values()) <= 1e-5, (case, off)
