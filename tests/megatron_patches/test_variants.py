"""Models that differ outside core attention, against unmodified megatron-core, and against a plain decoder where that
lacks something."""

import pytest
import torch

from distca.testing.ranks import run_ranks
from tests.megatron_patches.test_parity import _check, _suite

CPU = torch.device("cpu")


def _blocks(tp):
    """Of disaggregated blocks, and of blocks whose core attention is at home, in float64."""
    suite = _suite()
    from megatron_patches.parity import block, variants

    cases = [*variants.megatron_variants(tp), *variants.option_variants(tp)]
    cases = [case for case in cases if not variants.by_length(case)]
    weights = [block.rounded_weights(case, torch.float32) for case in cases]
    references = [
        block.block_unmodified(case, torch.float64, CPU, full) for case, full in zip(cases, weights, strict=True)
    ]
    results = []
    for run in (block.block_disaggregated, block.block_packed):
        for case, full, reference in zip(cases, weights, references, strict=True):
            results.append((case, run(case, torch.float64, CPU, "reference", full).error(reference), 1e-12))
    assert len(suite.LENGTHS) == 2
    return results


def _models(tp, pp):
    suite = _suite()
    from megatron_patches.parity import variants

    cases = [*variants.megatron_variants(tp, pp), *variants.option_variants(tp, pp)]
    if pp == 1:
        cases.append(variants.width_scaled_variant(tp))
    differences = suite.float32_differences(cases, CPU)
    return [(case, found, suite.FLOAT32_TOLERANCE) for case, found in zip(cases, differences, strict=True)]


@pytest.mark.slow
def test_blocks_in_float64():
    _check(run_ranks(4, _blocks, 2)[0])


@pytest.mark.slow
@pytest.mark.parametrize("ranks,tp,pp", [(2, 1, 1), (4, 2, 2)])
def test_loss_and_every_gradient(ranks, tp, pp):
    _check(run_ranks(ranks, _models, tp, pp)[0])
