"""Servers without a model beside homes, on gloo ranks, against unmodified Megatron-Core: float32."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distca.testing.ranks import run_ranks
from tests.megatron_patches.small_cases import on_cpu

pytestmark = pytest.mark.slow

HOMES = 4
MICRO_BATCHES = ((13, 7, 1, 29, 3), (50, 2), (5, 5, 40))
WINDOWS = {"window_size": (15, 0), "window_attn_skip_freq": 2}
SINKS = {"softmax_type": "learnable"}
CASES: tuple[dict[str, Any], ...] = (
    {"servers": 2},
    {"servers": 2, "backward": "resend", "ping_pong": False, "recompute": "mlp"},
    {"servers": 2, "ranks_per_node": 2, "recompute": "all"},
    {"servers": 2, "config": WINDOWS | SINKS},
    {"servers": 2, "micro_batches": ((1,), (2, 1))},
    {"servers": 2, "pp": 2},
    {"servers": 2, "pp": 2, "config": WINDOWS | SINKS},
    {"servers": 2, "tp": 2},
    {"servers": 2, "tp": 2, "backward": "resend", "config": SINKS},
)
"""The fifth has too little attention for a server to get any."""


def _in_worlds(folder: str) -> list[Any]:
    """Of every case: how far its outcome is from the reference, on homes; steps served, on servers."""
    on_cpu()
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank >= HOMES:
        from distca import serve

        store = dist.FileStore(f"{folder}/homes")
        return [serve(store, rank - HOMES, pool=pool) for pool in range(len(CASES))]
    dist.init_process_group("gloo", init_method=f"file://{folder}/homes", rank=rank, world_size=HOMES)
    from distca.parity import disaggregated, outcome, unmodified
    from distca.parity.cases import ParityCase, ParityShape

    found = []
    for settings in CASES:
        case = ParityCase(**{"micro_batches": MICRO_BATCHES, "shape": ParityShape(layers=4)} | settings)
        reference, weights = unmodified.run_unmodified(case, torch.float32, torch.device("cpu"))
        candidate = disaggregated.run_disaggregated(case, torch.float32, torch.device("cpu"), "reference", weights)
        found.append(outcome.difference(candidate, reference))
        gc.collect()  # servers go when the CAD does
    return found


def test_loss_and_every_gradient_are_those_of_unmodified_megatron(tmp_path: Any) -> None:
    *homes, first, second = run_ranks(HOMES + 2, _in_worlds, str(tmp_path))
    assert first == second == [1] * len(CASES)
    for settings, difference in zip(CASES, homes[0], strict=True):
        assert max(difference.loss, difference.gradient) <= 1e-5, (settings, difference)
