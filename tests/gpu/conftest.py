"""Tests that need GPUs; they skip themselves where there are none. Where there are fewer than ranks, ranks share them,
but for tests of speed, of GPU memory and of NVSHMEM between nodes.

Files of ``pytest -m "not alone"`` may run side by side, also on the same GPUs. Those of ``-m alone`` measure time or
memory, so they need two GPUs for themselves; ``python -m tests.gpu.all`` does both.
"""

import os
from pathlib import Path

import pytest
import torch

from tests.gpu.starts import SPOOL, Starts
from tests.gpu.worlds import Worlds


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if "starts" in item.fixturenames:
            item.add_marker(pytest.mark.timeout(0), append=False)  # cases have limits, but may begin late


@pytest.fixture(scope="session")
def spool(tmp_path_factory):
    """The folder that worlds take cases from: those of ``tests.gpu.all``, or of this process."""
    if SPOOL in os.environ:
        yield Path(os.environ[SPOOL])
        return
    folder = tmp_path_factory.mktemp("spool")
    with Worlds(folder, torch.cuda.device_count()) as worlds:
        yield folder
    assert not worlds.failures


@pytest.fixture(scope="module")
def starts(request, spool, tmp_path_factory):
    """The cases of a file's selected tests, which have the names of tests or of their parameters."""
    names = set()
    for item in request.session.items:
        if item.path == request.path and not any(mark.args[0] for mark in item.iter_markers("skipif")):
            names.add(item.name)
            if hasattr(item, "callspec"):
                names |= {item.callspec.id, *(f"{name} {value}" for name, value in item.callspec.params.items())}
    folder = tmp_path_factory.mktemp("starts")
    return Starts(spool, folder, request.path.stem, request.module.cases(folder), names)
