"""What backward needs in host memory: values behind a busy GPU, and two GPUs that train with and without it.

With its figures: pytest tests/gpu/test_offload.py --log-cli-level=INFO
``DISTCA_RESULTS=folder`` keeps them in folder/gpu_offload.json. The whole LLaMA-3 8B on two GPUs, its tokens/s and peak
memory measured and predicted, with 64K tokens per rank as it trains without, and with contexts that fit only with it:

    torchrun --standalone --nproc-per-node=2 -m benchmarks.throughput --output FOLDER/without --modes distca \\
        --mixes pretrain --contexts 131072 --batches 3 --warm-up 2 --traced 0 -- --config configs/llama-8b-2-gpus.yaml

then with ``--train.offload true`` behind it, and with that and ``--contexts 524288 --data.tokens_per_rank 262144``, or
``--parallel.tp 2 --contexts 1048576 --data.tokens_per_rank 1048576`` (450 and 900 GiB of host memory on the node).
"""

from __future__ import annotations

import logging
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from distca.device.offload import Offload
from distca.testing.ranks import run_ranks
from distca.train.config.cli import parse_run_config
from distca.train.run.memory import GIB, predict_memory
from tests.gpu.runs import keep_results, settings_line, train_on_gpus
from tests.train.small_runs import steps_of

pytestmark = pytest.mark.gpu
logger = logging.getLogger(__name__)
Settings = dict[str, Any]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")

KEPT: Settings = {"train.recompute": "all", "cad.backward": "resend", "train.offload": "false"}
MODES: dict[str, Settings] = {"without": {}, "with": {"train.offload": "true"}}
EXACT: Settings = KEPT | {"cad.deterministic": "true", "data.whole_documents": "false", "data.context_length": 16384}
WIDE: Settings = KEPT | {
    "model.layers": 8,
    "model.hidden": 4096,
    "model.ffn": 14336,
    "model.heads": 32,
    "model.kv_heads": 8,
    "data.path": "pretrain-long",
    "data.context_length": 65536,
    "data.tokens_per_rank": 32768,
    "data.whole_documents": "false",
    "train.micro_batches": 1,
    "train.steps": 10,
}
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
        torch.cuda._sleep(1_000_000_000)  # half a second
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


def _train(folder: Path, runs: dict[str, Settings]) -> None:
    lines = [own | {"output": folder, "name": name} for name, own in runs.items()]
    run_ranks(2, train_on_gpus, lines, gpus=True, timeout=500)


@needs_two
@pytest.mark.parametrize("layout", [{}, {"parallel.tp": 2}])
def test_losses_and_gradients_are_equal_bit_by_bit(tmp_path: Path, layout: Settings) -> None:
    own = EXACT | layout
    if layout:
        own |= {"data.tokens_per_rank": 16384}
    _train(tmp_path, {name: own | mode for name, mode in MODES.items()})
    for key in ("loss", "grad_norm"):
        without, offload = (steps_of(tmp_path / name, key) for name in MODES)
        assert without == offload and len(without) == 4, key


@needs_two
def test_peak_memory_falls_by_what_is_predicted_and_copies_hide(tmp_path: Path) -> None:
    _train(tmp_path, {name: WIDE | mode for name, mode in MODES.items()})
    found: dict[str, dict[str, float]] = {}
    for name, mode in MODES.items():
        (stage,) = predict_memory(parse_run_config(settings_line(WIDE | mode)), 2, 4096)
        peaks, seconds = (steps_of(tmp_path / name, key) for key in ("peak_memory_gb", "step_s"))
        found[name] = {
            "peak_gib": max(peaks.values()),
            "predicted_gib": stage.total / GIB,
            "step_s": median(each for step, each in seconds.items() if step > SETTLED),
            "first_step_s": seconds[1],
        }
        logger.info("%s: %s", name, found[name])
    keep_results("offload", 2, {"settings": settings_line(WIDE), "found": found})
    without, offload = (found[name] for name in MODES)
    saved, predicted = (without[key] - offload[key] for key in ("peak_gib", "predicted_gib"))
    assert predicted > 1 and saved == pytest.approx(predicted, rel=0.2)
    assert offload["step_s"] <= 1.05 * without["step_s"]
