"""Stacks of gated delta nets and attention against unmodified Megatron-Core, one document at a time: blocks in float64,
losses, every gradient and five optimizer steps in float32, all in one start of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distca.testing.ranks import run_ranks
from megatron_patches.versions import has_gated_delta_net
from tests.parity.test_parity import _check, _suite

CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not has_gated_delta_net(),
        reason="Megatron-Core has had this gated delta net since 0.19",
    ),
]


def _all() -> list[tuple[Any, dict[str, float], float]]:
    suite = _suite()
    from distca.parity import block, expert_steps, hybrid

    cases, results = hybrid.hybrid_cases(), []
    with hybrid.float32_casts_lifted():
        for case in cases:
            full = block.rounded_weights(case, torch.float32)
            reference = block.block_unmodified(case, torch.float64, CPU, full)
            found = block.block_disaggregated(case, torch.float64, CPU, "reference", full)
            results.append((case, found.error(reference), suite.FLOAT64_TOLERANCE))
    trained, compared = replace(cases[0], micro_batches=((13, 1, 9),)), cases[1]
    (found,) = suite.float32_differences([compared], CPU)
    results.append((compared, found, suite.FLOAT32_TOLERANCE))
    (found,) = expert_steps.step_differences([trained], CPU, distributed=True)
    results.append((trained, found, suite.FLOAT32_TOLERANCE))
    return results


def _loaded_from_a_checkpoint(path: Path) -> float:
    """The largest difference of weights that were saved by two tensor-parallel ranks and loaded by one."""
    from megatron.core import dist_checkpointing

    from distca.parity import disaggregated, hybrid, unmodified
    from megatron_patches.checkpoint.whole_weights import save_weights

    case = hybrid.hybrid_cases()[0]
    weights = {name: p.detach() for name, p in unmodified.unmodified_model(case, torch.float32).named_parameters()}
    _, saved = disaggregated.attached(case, torch.float32, CPU, "reference", weights)
    save_weights(saved, path)
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    _, loaded = disaggregated.attached(replace(case, tp=1), torch.float32, CPU, "reference", zeros)
    loaded.load_state_dict(dist_checkpointing.load({"model": loaded.sharded_state_dict()}, str(path))["model"])
    found = dict(loaded.named_parameters())
    return max((found[name] - weight).abs().max().item() for name, weight in weights.items())


def _in_one_start(path: Path) -> tuple[list[tuple[Any, dict[str, float], float]], float]:
    return _all(), _loaded_from_a_checkpoint(path)


def test_blocks_in_float64_whole_models_in_float32_and_a_checkpoint(tmp_path: Path) -> None:
    results, difference = run_ranks(4, _in_one_start, tmp_path)[0]
    assert len(results) == 6
    _check(results)
    assert difference == 0.0
