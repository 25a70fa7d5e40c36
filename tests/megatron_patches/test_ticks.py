"""Pipelines with idle stages serving, on gloo ranks, against unmodified megatron-core on one rank: float32."""

import warnings
from dataclasses import replace

import pytest
import torch

from distca.testing.ranks import run_ranks

CPU = torch.device("cpu")
MICRO_BATCHES = ((13, 7, 1, 29, 3), (50, 2), (5, 5, 40), (1,), (61,), (8, 9, 10))


def _differences(tp, pp, settings):
    warnings.filterwarnings("ignore")
    from megatron_patches.cpu import use_cpu

    use_cpu()
    from distca.attention.reference import ReferenceKernel
    from megatron_patches import parity
    from megatron_patches.pipeline_parity import run_pipelined

    cases = [replace(parity.ParityCase(tp=tp, **changes), shape=parity.ParityShape(layers=4)) for changes in settings]
    references = [parity.run_stock(case, torch.float32, CPU) for case in cases]
    results = []
    for case, (reference, weights) in zip(cases, references, strict=True):
        candidate = run_pipelined(case, torch.float32, CPU, ReferenceKernel(), weights, pp)
        results.append((case, parity.difference(candidate, reference)))
    return results


@pytest.mark.parametrize("ranks,tp,pp", [(2, 1, 2), (4, 1, 4), (4, 1, 2), (8, 2, 2)])
def test_loss_and_every_gradient(ranks, tp, pp):
    settings = [
        {
            "micro_batches": MICRO_BATCHES[:count],
            "ping_pong": count % 2 == 0,
            "recompute": ("all", "none", "mlp")[count % 3],
            "scheduler": ("real", "random")[count % 2],
            "tie_embeddings": count > 3,
        }
        for count in range(1, 7)
    ]
    for case, difference in run_ranks(ranks, _differences, tp, pp, settings)[0]:
        assert max(difference.loss, difference.gradient) <= 1e-5, (case, difference)
