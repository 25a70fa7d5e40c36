"""What backward needs in host memory: values behind a busy GPU, and two GPUs that train with and without it.

With its figures: pytest tests/gpu/test_offload.py --log-cli-level=INFO
``DISTCA_RESULTS=folder`` keeps them in folder/gpu_offload.json. The whole LLaMA-3 8B on two GPUs, its tokens/s and peak
memory measured and predicted, with 64K tokens per rank as it trains without, and with contexts that fit only with it:

    torchrun --standalone --nproc-per-node=2 -m benchmarks.throughput --output FOLDER/without --modes distca \\
        --mixes pretrain --contexts 131072 --batches 3 --warm-up 2 --traced 0 -- --config configs/llama-8b-2-gpus.yaml

then with ``--train.offload all`` behind it, and with that and ``--contexts 524288 --data.tokens_per_rank 262144``, or
``--parallel.tp 2 --contexts 1048576 --data.tokens_per_rank 1048576`` (450 and 900 GiB of host memory on the node).
"""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from distca.device.offload import Offload
from distca.testing.ranks import run_ranks
from tests.gpu.runs import keep_results, settings_line, train_on_gpus
from tests.gpu.starts import Case, Starts
from tests.train.small_runs import steps_of

pytestmark = pytest.mark.gpu
logger = logging.getLogger(__name__)
Settings = dict[str, Any]

KEPT: Settings = {"train.recompute": "all", "cad.backward": "resend", "data.whole_documents": "false"}
MODES: dict[str, Settings] = {"without": {"train.offload": "none"}, "with": {"train.offload": "all"}}
EXACT: Settings = {"cad.deterministic": "true", "data.context_length": 16384}
WIDE: Settings = {
    "model.layers": 8,
    "model.hidden": 4096,
    "model.ffn": 14336,
    "model.heads": 32,
    "model.kv_heads": 8,
    "data.path": "pretrain-long",
    "data.tokens_per_rank": 32768,
    "train.micro_batches": 1,
    "train.steps": 10,
}
RUNS = {"two ranks": EXACT, "tp2": EXACT | {"parallel.tp": 2, "data.tokens_per_rank": 16384}}
SETTLED = 4
"""Steps after which host memory is there and kernels are compiled."""
NUMBERS, ELEMENTS = 40, 4 << 20


def test_values_come_back_while_the_gpu_is_behind_the_host() -> None:
    """Their memory is used again at once, and the host waits for no copy."""
    window, ahead = 3, 2
    offload = Offload(torch.device("cuda", 0), window, ahead, chunk_bytes=24 << 20)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for first in (0, 1000, 2000):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda._sleep(3_000_000_000)  # more than a second
        parked = [offload.park(torch.full((ELEMENTS,), float(first + n), device="cuda")) for n in range(NUMBERS)]
        for n in reversed(range(NUMBERS)):
            values = parked.pop().take()
            wrong += (values != first + n).sum()
            values.fill_(-1)
            del values
        is_ahead = not torch.cuda.current_stream().query()
        assert wrong.item() == 0
        # The numbers, the window or those that come back, the comparison's bytes, and what one more takes.
        assert torch.cuda.max_memory_allocated() - before <= (window + ahead + 2) * 4 * ELEMENTS
        assert is_ahead or not first, "but for the first time, when host memory is taken"


def _all(folder: Path, runs: dict[str, Settings]) -> None:
    for name, settings in runs.items():
        for mode, own in MODES.items():
            train_on_gpus([KEPT | settings | own | {"name": f"{name} {mode}", "output": folder}])
            gc.collect()
            torch.cuda.empty_cache()


def cases(folder: Path) -> dict[str, Case]:
    """The runs that are compared bit by bit."""
    return {name: Case(2, _all, (folder, {name: settings})) for name, settings in RUNS.items()}


def _both(folder: Path, name: str, key: str) -> list[dict[int, float]]:
    """A figure of every step, without and with host memory."""
    return [steps_of(folder / f"{name} {mode}", key) for mode in MODES]


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_gradients_are_equal_bit_by_bit(starts: Starts, name: str) -> None:
    starts.result(name)
    for key in ("loss", "grad_norm"):
        without, offload = _both(starts.folder, name, key)
        logger.info("%s, %s: %s, %s", name, key, list(without.values()), list(offload.values()))
        assert without == offload and len(without) == 4


@pytest.mark.alone
def test_peak_memory_falls_by_what_is_predicted_and_copies_hide(tmp_path: Path) -> None:
    # Where ranks share a GPU, what they take says nothing.
    timed = min(2, torch.cuda.device_count())
    run_ranks(timed, _all, tmp_path, {"wide": WIDE | {"data.context_length": 32768 * timed}}, gpus=True, timeout=200)
    found = {
        key: [median(each for step, each in steps.items() if step > SETTLED) for steps in _both(tmp_path, "wide", key)]
        for key in ("peak_memory_gb", "predicted_memory_gb", "step_s")
    }
    found["first_step_s"] = [steps[1] for steps in _both(tmp_path, "wide", "step_s")]
    logger.info("Without and with host memory: %s", found)
    keep_results("offload", min(2, torch.cuda.device_count()), {"settings": settings_line(KEPT | WIDE), "found": found})
    saved, predicted = (found[key][0] - found[key][1] for key in ("peak_memory_gb", "predicted_memory_gb"))
    assert predicted > 1 and saved == pytest.approx(predicted, rel=0.2)
    without, offload = found["step_s"]
    assert offload <= 1.05 * without
