"""bfloat16 on GPUs: disaggregated training is no farther from float64 than stock megatron-core with the same kernel."""

import warnings
from dataclasses import replace

import pytest
import torch

from megatron_patches.versions import has_gated_delta_net
from tests.gpu.starts import Case

NAMES = ["all_modes", "edge_cases", "model_cases", "kind_cases"]
LATENT = pytest.param(
    "latent_cases",
    marks=pytest.mark.skipif(not has_gated_delta_net(), reason="Latent attention is served with Megatron-Core 0.19"),
)
LAYOUTS = [(1, 1, 0), (2, 1, 0), (2, 2, 0), (4, 1, 0), (4, 1, 2), (4, 2, 0)]
"""Ranks, TP and ranks of a node, or 0 for one node."""


def _ratios(tp, name, per_node):
    warnings.filterwarnings("ignore")
    from distca.parity import suite

    lengths = suite.GPU_EDGES if name == "edge_cases" else suite.GPU_LENGTHS
    cases = [replace(case, ranks_per_node=per_node) for case in getattr(suite, name)(tp, lengths)]
    figures = suite.bfloat16_ratios(cases, torch.device("cuda", torch.cuda.current_device()))
    return list(zip(cases, figures, strict=True)), suite.BFLOAT16_RATIO


def cases(_):
    return {
        f"{ranks}-{tp}-{per_node}-{name}": Case(
            ranks, _ratios, (tp, name, per_node), world="TP" if (ranks, tp) == (4, 2) else "", limit_s=600
        )
        for name in [*NAMES, "latent_cases"]
        for ranks, tp, per_node in LAYOUTS
    }


@pytest.mark.parametrize("name", [*NAMES, LATENT])
@pytest.mark.parametrize("ranks,tp,per_node", LAYOUTS)
def test_no_farther_from_float64_than_stock(starts, ranks, tp, per_node, name):
    results, ratio = starts.result(f"{ranks}-{tp}-{per_node}-{name}")[0]
    for case, figures in results:
        assert max(figures.values()) <= ratio, (case, figures)
