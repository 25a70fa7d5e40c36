"""bfloat16 on GPUs: disaggregated training is no farther from float64 than stock megatron-core with the same kernel."""

import warnings
from dataclasses import replace

import pytest
import torch

from distca.testing.ranks import run_ranks
from megatron_patches.versions import has_gated_delta_net

LATENT = pytest.param(
    "latent_cases",
    marks=pytest.mark.skipif(not has_gated_delta_net(), reason="Latent attention is served with Megatron-Core 0.19"),
)


def _ratios(tp, name, per_node):
    warnings.filterwarnings("ignore")
    from distca.parity import suite

    lengths = suite.GPU_EDGES if name == "edge_cases" else suite.GPU_LENGTHS
    cases = [replace(case, ranks_per_node=per_node) for case in getattr(suite, name)(tp, lengths)]
    figures = suite.bfloat16_ratios(cases, torch.device("cuda", torch.cuda.current_device()))
    return list(zip(cases, figures, strict=True)), suite.BFLOAT16_RATIO


@pytest.mark.parametrize("name", ["all_modes", "edge_cases", "model_cases", "kind_cases", LATENT])
@pytest.mark.parametrize("ranks,tp,per_node", [(1, 1, 0), (2, 1, 0), (2, 2, 0), (4, 1, 0), (4, 1, 2), (4, 2, 0)])
def test_no_farther_from_float64_than_stock(ranks, tp, per_node, name):
    results, ratio = run_ranks(ranks, _ratios, tp, name, per_node, timeout=400, gpus=True)[0]
    for case, figures in results:
        assert max(figures.values()) <= ratio, (case, figures)
