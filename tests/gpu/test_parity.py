"""bfloat16 on GPUs: disaggregated training is no farther from float64 than stock megatron-core with the same kernel."""

import warnings
from dataclasses import replace

import pytest
import torch

from megatron_patches.versions import has_gated_delta_net

pytestmark = pytest.mark.timeout(900)

NAMES = ["all_modes", "edge_cases", "model_cases", "kind_cases"]
LATENT = pytest.param(
    "latent_cases",
    marks=pytest.mark.skipif(not has_gated_delta_net(), reason="Latent attention is served with Megatron-Core 0.19"),
)
LAYOUTS = [(1, 1, 0), (2, 1, 0), (2, 2, 0), (4, 1, 0), (4, 1, 2), (4, 2, 0)]
STARTS = {
    "one rank": LAYOUTS[:1],
    "two ranks": LAYOUTS[1:3],
    "four ranks": LAYOUTS[3:5],
    "four ranks, TP": LAYOUTS[5:],
}


def _ratios(tp, name, per_node):
    warnings.filterwarnings("ignore")
    from distca.parity import suite

    lengths = suite.GPU_EDGES if name == "edge_cases" else suite.GPU_LENGTHS
    cases = [replace(case, ranks_per_node=per_node) for case in getattr(suite, name)(tp, lengths)]
    figures = suite.bfloat16_ratios(cases, torch.device("cuda", torch.cuda.current_device()))
    return list(zip(cases, figures, strict=True)), suite.BFLOAT16_RATIO


def _cases(start):
    names = [*NAMES, *(["latent_cases"] if has_gated_delta_net() else [])]
    layouts = [(f"{ranks}-{tp}-{per_node}", tp, per_node) for ranks, tp, per_node in STARTS[start]]
    return {f"{layout}-{name}": (_ratios, tp, name, per_node) for layout, tp, per_node in layouts for name in names}


@pytest.mark.parametrize("name", [*NAMES, LATENT])
@pytest.mark.parametrize("ranks,tp,per_node", LAYOUTS)
def test_no_farther_from_float64_than_stock(starts, request, ranks, tp, per_node, name):
    for start, ((ranks_of_start, *_), *_) in STARTS.items():
        starts.begin(start, ranks_of_start, _cases(start))
    start = next(start for start, layouts in STARTS.items() if (ranks, tp, per_node) in layouts)
    results, ratio = starts.result(start, request.node.callspec.id, ranks, _cases(start))[0]
    for case, figures in results:
        assert max(figures.values()) <= ratio, (case, figures)
