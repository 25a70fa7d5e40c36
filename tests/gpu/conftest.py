"""Tests that need GPUs; they skip themselves where there are none. Where there are fewer than ranks, ranks share them,
but for tests of speed, of GPU memory and of NVSHMEM between nodes.

Files of ``pytest -m "not alone"`` may run side by side, also on the same GPUs. Those of ``-m alone`` measure time or
memory, so they run one after the other; ``python -m tests.gpu.all`` does both."""

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
