"""Multi-head latent attention, whose values are narrower than its keys, against unmodified megatron-core on one
document at a time and without tensor parallelism."""

import pytest
import torch

from megatron_patches.versions import has_gated_delta_net
from tests.parity.test_parity import _check, _suite

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_gated_delta_net(), reason="Latent attention is served with Megatron-Core 0.19"),
]
CPU = torch.device("cpu")


def _loss_and_gradients(dense, mixed):
    """Of cases (tensor-parallel ranks, stages, numbers), and with experts (and expert-parallel ranks in between); with
    one stage also of the block in float64."""
    suite = _suite()
    from distca.parity.experts import expert_differences
    from distca.parity.latent_cases import latent_expert_cases

    cases = [suite.latent_cases(tp, pp=pp)[number] for tp, pp, numbers in dense for number in numbers]
    exact = [case for case in cases if case.pp == 1]
    blocks = [(*each, suite.FLOAT64_TOLERANCE) for each in zip(exact, suite.float64_errors(exact, CPU), strict=True)]
    found = list(zip(cases, suite.float32_differences(cases, CPU), strict=True))
    cases = [latent_expert_cases(tp, pp, ep)[number] for tp, pp, ep, numbers in mixed for number in numbers]
    found += zip(cases, expert_differences(cases, CPU), strict=True)
    return blocks + [(case, figures, suite.FLOAT32_TOLERANCE) for case, figures in found]


@pytest.mark.parametrize(
    "ranks,dense,mixed",
    [
        (2, [(1, 1, (1, 3, 4)), (2, 1, (0,))], [(1, 1, 2, (0,))]),
        pytest.param(2, [(1, 1, (2,)), (2, 1, (5,))], [], marks=pytest.mark.matrix),
        (4, [(2, 2, (2,))], [(2, 2, 2, (1,))]),
        pytest.param(4, [(2, 2, (3,))], [(1, 2, 2, (0,))], marks=pytest.mark.matrix),
    ],
)
def test_loss_and_every_gradient(worlds, ranks, dense, mixed):
    """Queries of low rank and whole ones, norms and none, RoPE and YaRN, with experts, stages and tensor
    parallelism."""
    _check(worlds.call(ranks, _loss_and_gradients, dense, mixed)[0])
