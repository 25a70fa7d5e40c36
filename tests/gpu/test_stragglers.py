"""One of two GPUs that is slowed by a tenth is named, and no GPU is while both are healthy.

``DISTCA_RESULTS=folder`` keeps what was measured in folder/gpu_stragglers.json.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distca.testing.ranks import run_ranks
from distca.train.metrics.slow_ranks import STEPS
from tests.gpu.runs import keep_results, settings_line, train_on_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.alone]

HEALTHY_STEPS, SLOW_STEPS, SLOWED_BY = 122, 40, 0.1
SETTINGS = {
    "model.layers": 2,
    "data.context_length": 65536,
    "data.tokens_per_rank": 65536,
    "data.whole_documents": "false",
    "train.micro_batches": 1,
}
_TIMED_CALLS = 8


@dataclass
class Watched:
    """What a run said of its ranks' speed.

    Attributes:
        named: step and rank.
        slower: by step from when it is known, every rank's time over the other's, less 1.
        warnings: of the log.
    """

    named: list[tuple[int, int]] = field(default_factory=list)
    slower: dict[int, list[float]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class Slowed:
    """A half of the attention server that takes longer, by matrix products behind it.

    Args:
        serve: the half, as in distca.runtime.server.
        device: of this rank.
    """

    def __init__(self, serve: Callable[..., Any], device: torch.device) -> None:
        from distca.device.clock import Clock

        self._serve, self._clock = serve, Clock(device)
        width, dtype = (2048, torch.bfloat16) if device.type == "cuda" else (128, torch.float32)
        self._matrix = torch.randn(width, width, dtype=dtype, device=device)
        self._timed((self._matrix @ self._matrix).sum)  # what is first takes longer
        self._product_s = self._timed(lambda: [self._matrix @ self._matrix for _ in range(50)])[1] / 50
        self._calls, self._seconds, self._pairs = 0, 0.0, 0.0

    def __call__(self, kernel: Any, route: Any, *tensors: Any) -> Any:
        pairs = sum(self._pairs_of(each.batch) for each in route.batches)
        if self._calls < _TIMED_CALLS:  # in steps that do not count yet
            result, seconds = self._timed(lambda: self._serve(kernel, route, *tensors))
            self._calls += 1
            if self._calls > _TIMED_CALLS // 2:
                self._seconds, self._pairs = self._seconds + seconds, self._pairs + pairs
            return result
        result = self._serve(kernel, route, *tensors)
        for _ in range(round(SLOWED_BY * pairs * self._seconds / self._pairs / self._product_s)):
            self._matrix @ self._matrix
        return result

    def _timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        start = self._clock.work()
        result = call()
        return result, self._clock.seconds(start, self._clock.work())

    @staticmethod
    def _pairs_of(batch: Any) -> float:
        q, kv = (borders[1:] - borders[:-1] for borders in (batch.borders_q, batch.borders_kv))
        return float((q * (kv - (q - 1) / 2.0)).sum())


def watch(train: Callable[[], Any], device: torch.device, slow_rank: int | None) -> Watched:
    """Train with a rank slowed, or none, and note what is said of speeds; every rank calls it."""
    from unittest.mock import patch

    from distca.runtime import attention_call
    from distca.train.metrics.slow_ranks import SlowRanks

    watched, steps, add = Watched(), iter(range(1, 10**6)), SlowRanks.add

    def noted(self: SlowRanks, *given: Any) -> list[int]:
        step, named = next(steps), add(self, *given)
        watched.named += [(step, rank) for rank in named]
        if self.slower is not None:
            watched.slower[step] = self.slower.tolist()
        return named

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            watched.warnings.append(record.getMessage())

    keep = Keep(logging.WARNING)
    log = logging.getLogger("distca.train.metrics")
    log.addHandler(keep)
    halves = {name: getattr(attention_call, name) for name in ("compute_forward", "compute_backward")}
    if dist.get_rank() == slow_rank:
        halves = {name: Slowed(serve, device) for name, serve in halves.items()}
    try:
        with patch.object(SlowRanks, "add", noted), patch.multiple(attention_call, **halves):
            train()
    finally:
        log.removeHandler(keep)
    return watched


def _on_gpus(output: Path) -> tuple[Watched, Watched]:
    """A healthy run, then one with rank 1 slowed."""
    device, found = torch.device("cuda", torch.cuda.current_device()), []
    for steps, slow_rank in ((HEALTHY_STEPS, None), (SLOW_STEPS, 1)):
        settings = SETTINGS | {"output": output, "train.steps": steps}
        found.append(watch(partial(train_on_gpus, [settings]), device, slow_rank))
    return found[0], found[1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Watched, Watched]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    healthy, slow = run_ranks(2, _on_gpus, tmp_path_factory.mktemp("runs"), timeout=240, gpus=True)[0]
    found = {"healthy": asdict(healthy), "rank_1_slowed": asdict(slow)}
    keep_results("stragglers", 2, {"settings": settings_line(SETTINGS), "slowed_by": SLOWED_BY} | found)
    return healthy, slow


def test_healthy_gpus_are_not_named(runs: tuple[Watched, Watched]) -> None:
    healthy, _ = runs
    assert max(healthy.slower) == HEALTHY_STEPS and HEALTHY_STEPS - min(healthy.slower) >= 100
    assert healthy.named == [] and healthy.warnings == [], max(healthy.slower.values(), key=max)


def test_a_gpu_that_is_a_tenth_slower_is_named_and_no_other(runs: tuple[Watched, Watched]) -> None:
    _, slow = runs
    ((step, rank),) = slow.named
    assert rank == 1 and STEPS <= step <= STEPS + 10, slow.slower
    named, advice = slow.warnings
    assert named.startswith("Rank 1 (") and "--cad.speeds '[1,0." in advice
    assert slow.slower[SLOW_STEPS][1] == pytest.approx(SLOWED_BY, abs=0.04)
