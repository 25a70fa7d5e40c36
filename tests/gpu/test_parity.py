"""bfloat16 on GPUs: disaggregated training is no farther from float64 than stock megatron-core with the same kernel."""

import warnings

import pytest
import torch

from distca.testing.ranks import run_ranks


def _ratios(tp, edges):
    warnings.filterwarnings("ignore")
    from megatron_patches.parity import suite

    cases = suite.edge_cases(tp, suite.GPU_EDGES) if edges else suite.all_modes(tp, suite.GPU_LENGTHS)
    figures = suite.bfloat16_ratios(cases, torch.device("cuda", torch.cuda.current_device()))
    return list(zip(cases, figures, strict=True)), suite.BFLOAT16_RATIO


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("ranks,tp", [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_no_farther_from_float64_than_stock(ranks, tp, edges):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    results, ratio = run_ranks(ranks, _ratios, tp, edges, timeout=400, gpus=True)[0]
    for case, figures in results:
        assert max(figures.values()) <= ratio, (case, figures)
