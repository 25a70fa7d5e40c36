"""Models that differ outside core attention, against unmodified megatron-core, and against a plain decoder where that
lacks something."""

import pytest
import torch

from tests.parity.checkpoints import loaded_from_checkpoints
from tests.parity.test_parity import _check, _suite

CPU = torch.device("cpu")


def _blocks(tp, at_home):
    """Of disaggregated blocks, and of our options' blocks whose core attention is at home, in float64; or of those of
    Megatron's own fields at home."""
    _suite()
    from distca.parity import block, variants

    ours = variants.option_variants(tp)
    cases = [*variants.megatron_variants(tp), *(() if at_home else ours)]
    cases = [case for case in cases if not variants.by_length(case)]
    weights = [block.rounded_weights(case, torch.float32) for case in cases]
    references = [
        block.block_unmodified(case, torch.float64, CPU, full) for case, full in zip(cases, weights, strict=True)
    ]
    results = []
    for run in (block.block_disaggregated, block.block_packed):
        for case, full, reference in zip(cases, weights, references, strict=True):
            if at_home == (run is block.block_packed) or case in ours:
                results.append((case, run(case, torch.float64, CPU, "reference", full).error(reference), 1e-12))
    return results


def _models(tp, pp, megatrons, options):
    """By number of the case. Gemma 3's parts others have, as they have those of Megatron's first two."""
    suite = _suite()
    from distca.parity import variants

    fields = variants.megatron_variants(tp, pp)
    cases = [fields[number] for number in megatrons if number < len(fields)]  # versions before 0.17 lack the last one
    cases += [variants.option_variants(tp, pp)[number] for number in options]
    differences = suite.float32_differences(cases, CPU)
    return [(case, found, suite.FLOAT32_TOLERANCE) for case, found in zip(cases, differences, strict=True)]


def _on_two_ranks():
    """Blocks, and models whose layers have vectors that tensor-parallel ranks share."""
    return [*_blocks(1, False), *_models(2, 1, (2,), (2, 4))]


@pytest.mark.slow
def test_blocks_in_float64_and_models_of_tensor_parallel_ranks(worlds):
    _check(worlds.call(2, _on_two_ranks)[0])


@pytest.mark.slow
@pytest.mark.matrix
def test_blocks_of_megatrons_fields_at_home(worlds):
    _check(worlds.call(2, _blocks, 1, True)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "megatrons,options",
    [((4,), (0, 3, 5)), pytest.param((2, 3), (2, 4, 6), marks=pytest.mark.matrix)],
    ids=["suite", "further"],
)
def test_loss_and_every_gradient(worlds, megatrons, options):
    """With all kinds of parallelism but data parallelism; ``distca parity --kinds`` has the other layouts. In the suite
    are the models that do something before the first layer, after the last one, or by documents' lengths."""
    _check(worlds.call(4, _models, 2, 2, megatrons, options)[0])


def _resharded(path):
    _suite()
    from distca.parity import variants

    return loaded_from_checkpoints(variants.option_variants(2), path)


@pytest.mark.slow
def test_checkpoints_of_all_variants_load_on_other_ranks(worlds, tmp_path):
    assert set(worlds.call(2, _resharded, tmp_path)[0]) == {0.0}
