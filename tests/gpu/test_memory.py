"""Memory outside torch of two GPUs that train is what predictions leave for it, or less.

``DISTCA_RESULTS=folder`` keeps what was measured in folder/gpu_memory.json.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distca.device.memory import outside_torch
from distca.testing.ranks import run_ranks
from distca.train.run.memory_fit import OUTSIDE_TORCH
from distca.transport.select import why_not_nvshmem
from tests.gpu.runs import keep_results, settings_line, train_on_gpus
from tests.train.small_runs import steps_of

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
_A_CONTEXT = 2 << 30


@pytest.fixture(autouse=True)
def other_processes_are_gone() -> None:
    """What lies outside torch is the whole GPU's, other processes' memory too."""
    free, total = torch.cuda.mem_get_info()
    if total - free > _A_CONTEXT:
        pytest.skip("other processes use this GPU")


def test_torchs_own_memory_does_not_count() -> None:
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    before = outside_torch(device)
    held = torch.zeros(1 << 30, dtype=torch.uint8, device=device)
    assert 0 < before < OUTSIDE_TORCH and abs(outside_torch(device) - before) < 16 << 20 < held.nbytes


def test_runs_have_no_more_outside_torch_than_predicted(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    transports = ["nccl"] if why_not_nvshmem() else ["nccl", "nvshmem"]  # in this order: NVSHMEM keeps its memory
    runs = [{"output": tmp_path, "name": transport, "cad.transport": transport} for transport in transports]
    run_ranks(2, train_on_gpus, runs, gpus=True, timeout=200)
    found = {transport: steps_of(tmp_path / transport, "outside_torch_gib") for transport in transports}
    keep_results("memory", 2, {"settings": settings_line({}), "outside_torch_gib": found})
    for by_step in found.values():
        assert list(by_step) == [1, 2, 3, 4]
        assert min(by_step.values()) > 0 and max(by_step.values()) * 2**30 <= OUTSIDE_TORCH
