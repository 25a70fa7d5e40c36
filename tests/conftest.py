"""Settings of all tests.

No deadline per example: on a shared machine hypothesis would otherwise report its neighbours as flaky tests. Ranks are
forked from a process that has imported Megatron-Core already, which takes longer than most of what they do.
"""

import atexit
import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from distca.testing.ranks import preload

CORES = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset[int]()
"""Numbers of the cores that this process may use; none where the system does not say."""

if CORES and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
    # Ranks of a test wait for each other most of the time. On one core, one wakes another up without a signal between
    # cores, which takes long on virtual machines; and as a batch, without ending the other's turn.
    os.sched_setaffinity(0, {sorted(CORES)[int(worker.removeprefix("gw")) % len(CORES)]})
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

gc.disable()  # until all tests are imported, none of which is garbage

atexit.register(gc.freeze)  # what is left need not be looked at when Python ends

settings.register_profile("shared machine", deadline=None, max_examples=50)
settings.register_profile("thorough", deadline=None, max_examples=500)  # for the matrix: --hypothesis-profile thorough
settings.load_profile("shared machine")

if not torch.cuda.is_available():
    preload(
        "megatron_patches",  # before Megatron-Core, whose functions it keeps from torch.compile
        "pytest",
        "hypothesis.strategies",
        "encodings.idna",  # names of hosts
        "torch.utils.serialization.config",
        "megatron.core.models.mimo",  # the first optimizer imports it
        "torch._dynamo",  # the first optimizer and the first checkpoint of activations import it
        "torch.distributed.launcher.api",
        "matplotlib.backends.backend_agg",
        "matplotlib.figure",
        "docstring_parser",
        "distca.parity.suite",
        "distca.parity.expert_steps",
        "megatron_patches.patches.cpu",
        "megatron_patches.layers.hybrid_stack",
        "megatron_patches.hugging_face.export",
        "megatron_patches.training.optimizer",
        "megatron_patches.patches.stage_timers",
        "megatron_patches.checkpoint.save_load",
        "distca.simulate",
        "distca.train.checkpoint.checkpoints",
        "distca.train.run.consistency",
        "distca.train.run.record",
        "distca.train.run.main",
        "distca.train.run.loop",
        "distca.train.run.builder",
        "tests.benchmarks.baseline_parity",
        "benchmarks.throughput.session",
        "tests.testing.first_uses",
    )


@pytest.fixture
def all_cores() -> Iterator[None]:
    """Lets a test use all cores; it is skipped where there is one."""
    if len(CORES) < 2:
        pytest.skip("it needs two cores")
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CORES)
    yield
    os.sched_setaffinity(0, own)


def pytest_collection(session: pytest.Session) -> None:
    """Each process of pytest-xdist imports other test files first. It finds the rest compiled by its neighbours, which
    would otherwise compile all files at the same time in a fresh clone."""
    worker, folder = os.environ.get("PYTEST_XDIST_WORKER"), Path(__file__).parent
    if not worker or session.config.args != session.config.getini("testpaths"):
        return
    files, workers = sorted(folder.rglob("test_*.py")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    share = int(worker.removeprefix("gw")) % workers
    for file in files[share * len(files) // workers : (share + 1) * len(files) // workers]:
        with suppress(Exception, pytest.skip.Exception):  # the collection imports it again and says so
            importlib.import_module(".".join(("tests", *file.relative_to(folder).with_suffix("").parts)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that no process of pytest-xdist is left alone with one at the end."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 50)  # as in ranks: little of what tests leave is garbage that has to be looked for
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
