"""Models that differ outside core attention, against unmodified megatron-core, and against a plain decoder where that
lacks something."""

import pytest
import torch

from distca.testing.ranks import run_ranks
from tests.parity.checkpoints import loaded_from_checkpoints
from tests.parity.test_parity import _check, _suite

CPU = torch.device("cpu")


def _blocks(tp):
    """Of disaggregated blocks, and of blocks whose core attention is at home, in float64."""
    _suite()
    from distca.parity import block, variants

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
    return results


def _models(tp, pp):
    suite = _suite()
    from distca.parity import variants

    cases = [*variants.megatron_variants(tp, pp)[2:], *variants.option_variants(tp, pp)]
    del cases[-6]  # Gemma 3, whose parts others have, as they have those of the first two
    differences = suite.float32_differences(cases, CPU)
    return [(case, found, suite.FLOAT32_TOLERANCE) for case, found in zip(cases, differences, strict=True)]


@pytest.mark.slow
def test_blocks_in_float64():
    _check(run_ranks(2, _blocks, 1)[0])


@pytest.mark.slow
def test_loss_and_every_gradient():
    """With all kinds of parallelism but data parallelism; ``distca parity --kinds`` has the other layouts."""
    _check(run_ranks(4, _models, 2, 2)[0])


def _resharded(path):
    _suite()
    from distca.parity import variants

    return loaded_from_checkpoints(variants.option_variants(2), path)


@pytest.mark.slow
def test_checkpoints_of_all_variants_load_on_other_ranks(tmp_path):
    assert set(run_ranks(2, _resharded, tmp_path)[0]) == {0.0}
