"""bfloat16 on GPUs: disaggregated training is no farther from float64 than stock megatron-core with the same kernel."""

import warnings

import pytest
import torch

from distca.testing.ranks import run_ranks


def _ratios(tp, name):
    warnings.filterwarnings("ignore")
    from megatron_patches.parity import suite

    lengths = suite.GPU_EDGES if name == "edge_cases" else suite.GPU_LENGTHS
    cases = getattr(suite, name)(tp, lengths)
    figures = suite.bfloat16_ratios(cases, torch.device("cuda", torch.cuda.current_device()))
    return list(zip(cases, figures, strict=True)), suite.BFLOAT16_RATIO


@pytest.mark.parametrize("name", ["all_modes", "edge_cases", "model_cases"])
@pytest.mark.parametrize("ranks,tp", [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_no_farther_from_float64_than_stock(ranks, tp, name):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    results, ratio = run_ranks(ranks, _ratios, tp, name, timeout=400, gpus=True)[0]
    for case, figures in results:
        assert max(figures.values()) <= ratio, (case, figures)
