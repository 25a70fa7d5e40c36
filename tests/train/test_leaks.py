"""What a step allocates is free at its end, whatever was kept until backward: no step leaves more than an early one.
Weights are free when their trainer is gone, also after a checkpoint."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path

import pytest
import torch.distributed as dist

from distca.testing.ranks import run_ranks
from distca.train.config.cli import parse_run_config
from tests.train.live_memory import LeanKernel, LiveBytes
from tests.train.small_runs import StepByStep, arguments, write_texts

pytestmark = pytest.mark.slow

_SENT = 0.05
"""Seconds after a step in which gloo's threads let go of the last tensors that they sent."""
CASES = [
    {"parallel__pp": stages, "model__layers": 2 * stages, "cad__backward": backward, "train__recompute": recompute}
    for stages, backward, recompute in (
        (1, "keep", "none"),
        (1, "keep", "all"),
        (1, "resend", "mlp"),
        (2, "resend", "none"),
        (2, "resend", "all"),
    )
]


def _live(command_lines: list[list[str]], steps: int) -> list[list[int]]:
    """By run: bytes that are alive at the end of each step."""
    from megatron_patches import pool
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    pool.choose_kernel = lambda *_, **__: LeanKernel()  # in fewer operations
    # Collections would free some of what should have been free without them.
    gc.disable()
    return [_measure(line, steps) for line in command_lines]


def _left_after_a_checkpoint(line: list[str], path: Path) -> int:
    """How many weights are alive after their trainer, which has saved a checkpoint."""
    from megatron_patches.checkpoint.save_load import save_checkpoint
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    run = StepByStep(parse_run_config(line))
    run.run(run.step())
    run.trainer.optimizer.step()
    save_checkpoint(path, run.trainer.model, run.trainer.optimizer, {"step": 1})
    weights = [weakref.ref(weight) for weight in run.trainer.model.parameters()]
    assert len(weights) > 1
    run.close()
    del run
    gc.collect()
    return sum(weight() is not None for weight in weights)


def _measure(line: list[str], steps: int) -> list[int]:
    run, found = StepByStep(parse_run_config(line)), []
    step = run.step()
    with LiveBytes(peak=False) as live:
        for _ in range(steps):
            run.run(step)
            run.trainer.optimizer.step()
            dist.barrier()
            time.sleep(_SENT)
            found.append(live.now())
    run.close()
    return found


@pytest.mark.parametrize("cases", [CASES[1:4], pytest.param([CASES[0], CASES[4]], marks=pytest.mark.matrix)])
def test_steps_leave_nothing_behind(tmp_path: Path, cases: list[dict[str, object]]) -> None:
    texts = write_texts(tmp_path / "texts")
    shape = {"train__micro_batches": 3, "data__whole_documents": True}
    lines = [arguments(data__path=texts, output=tmp_path, **shape, **case) for case in cases]
    for rank in run_ranks(2, _live, lines, 3):
        for case, (_, second, third) in zip(cases, rank, strict=True):
            assert second == third, case


def test_weights_go_with_their_trainer_after_a_checkpoint(tmp_path: Path) -> None:
    line = arguments(data__path=write_texts(tmp_path / "texts"), output=tmp_path)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    assert run_ranks(2, _left_after_a_checkpoint, line, checkpoint) == [0, 0]
