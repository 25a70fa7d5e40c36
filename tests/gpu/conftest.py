"""Tests that need GPUs; they skip themselves where there are none. Where there are fewer than ranks, ranks share them,
but for tests of speed, of GPU memory and of NVSHMEM between nodes.

Files of ``pytest -m "not alone"`` may run side by side, also on the same GPUs. Those of ``-m alone`` measure time or
memory, so they run one after the other; ``python -m tests.gpu.all`` does both.
"""

from pathlib import Path

import pytest
import torch

from tests.gpu.starts import Starts


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="module")
def starts(request, tmp_path_factory):
    """Of the selected tests of a file, whose cases are named as the parameters of the test, or as the test."""
    items = [item for item in request.session.items if item.path == request.path]
    names = {item.callspec.id if hasattr(item, "callspec") else item.name for item in items}
    made = Starts(tmp_path_factory.mktemp("starts"), names)
    yield made
    made.close()
