"""Tests that need GPUs; they skip themselves where there are none. Where there are fewer than ranks, ranks share them,
but for tests of speed, of GPU memory and of NVSHMEM between nodes."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
