"""Gradients that are added up in bfloat16, against unmodified Megatron-Core with the same setting and float64."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch

from distca.testing.ranks import run_ranks
from tests.megatron_patches import small_cases

pytestmark = pytest.mark.slow

MICRO_BATCHES = ((13, 7, 1, 29, 3), (50, 2), (17, 5))
CASES: list[dict[str, Any]] = [{"tie_embeddings": True}, {"recompute": "all", "backward": "resend"}]
CPU = torch.device("cpu")


def _distances(cases: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """By case, ours and unmodified Megatron's differences from float64, with the same bfloat16 weights."""
    small_cases.on_cpu()
    from distca.parity import disaggregated, outcome
    from distca.parity.cases import ParityCase

    found = []
    for changes in cases:
        case = replace(ParityCase(micro_batches=MICRO_BATCHES), **changes)
        exact, weights = _exact(case)
        ours = disaggregated.run_disaggregated(
            case, torch.bfloat16, CPU, "reference", weights, gradients=torch.bfloat16, summed_loss=False
        )
        found.append(tuple(outcome.difference(each, exact) for each in (ours, _unmodified(case, weights))))
    return found


def _exact(case: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """In float64, and the weights, which are bfloat16 numbers."""
    from distca.parity import unmodified

    model = unmodified.unmodified_model(case, torch.float64)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return unmodified.computed_once(lambda: unmodified.unmodified_outcome(case, model, CPU)), weights


def _unmodified(case: Any, weights: dict[str, torch.Tensor]) -> Any:
    """Megatron's own model and DDP, which adds up what backward leaves; the first rank computes."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from distca.parity import unmodified

    model = unmodified.unmodified_model(case, torch.float32).bfloat16()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weights[name])
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    assert all(weight.main_grad.dtype == torch.bfloat16 for weight in model.parameters())
    with wrapped.no_sync():
        return unmodified.computed_once(lambda: unmodified.unmodified_outcome(case, model, CPU))


def test_bfloat16_gradients_are_no_further_from_float64_than_unmodified_megatrons() -> None:
    for case, (ours, theirs) in zip(CASES, run_ranks(2, _distances, CASES)[0], strict=True):
        assert theirs.gradient < inf and ours.gradient <= 1.1 * theirs.gradient, (case, ours, theirs)
        assert theirs.loss < inf and ours.loss <= max(1.1 * theirs.loss, 1e-4), (case, ours, theirs)
