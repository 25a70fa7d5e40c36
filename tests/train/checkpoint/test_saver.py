"""Checkpoints that are written while training goes on: what they hold, when they count, and what ends a run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distca.errors import CheckpointError
from distca.testing.ranks import run_ranks
from distca.train.config.cli import parse_run_config
from distca.train.run.run_folder import RunFolder
from tests.train.small_runs import StepByStep, arguments, write_texts


def _weights(run: StepByStep) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in run.trainer.model.parameters()]


def _background(line: list[str], folder: Path) -> dict[str, Any]:
    """What a rank sees of four checkpoints: one that is held up while training goes on, one right after it, one that
    the second rank cannot write, and one for which there is no host memory."""
    from distca.train.checkpoint import saver
    from megatron_patches.checkpoint import staging, writer
    from megatron_patches.checkpoint.save_load import load_checkpoint
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    run, seen, gate = StepByStep(parse_run_config(line)), dict[str, Any](), threading.Event()
    saving, files, write = saver.Saver(run.trainer, RunFolder(folder)), RunFolder(folder), writer.TorchWriter.write

    def update() -> None:
        run.run(run.step())
        saving.before_update()
        run.trainer.optimizer.step()

    def later(self: writer.TorchWriter) -> None:
        gate.wait(60)
        write(self)

    writer.TorchWriter.write = later  # type: ignore[method-assign]
    update()
    saved = _weights(run)
    saving.save(1, {"at": 1})
    update()
    seen["held up"] = [each.step for each in files.checkpoints()]
    moved = any(not torch.equal(*both) for both in zip(saved, _weights(run), strict=True))
    threading.Timer(0.5, gate.set).start()
    saving.save(2, {"at": 2})
    dist.barrier()
    seen["the first is done"] = files.checkpoints()[0].step
    saving.finish()
    dist.barrier()
    seen["both are done"] = [each.step for each in files.checkpoints()]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    writer.TorchWriter.write = write  # type: ignore[method-assign]
    of_torch = writer.checkpoint.FileSystemWriter
    write_data = of_torch.write_data
    if dist.get_rank() == 1:
        of_torch.write_data = full  # type: ignore[method-assign,assignment]
    saving.save(3, {})
    assert saving._writing is not None
    saving._writing.join(60)
    seen["failed"] = saving.has_failed
    try:
        saving.finish()
    except CheckpointError as error:
        seen["said"] = str(error)
    seen["left"] = files.checkpoint_path(3).exists()
    of_torch.write_data = write_data  # type: ignore[method-assign]
    saving.close()
    staging.free_host_memory = lambda: 0 if dist.get_rank() else 2**40
    saving.save(4, {})
    seen["written at once"] = len(list(files.checkpoint_path(4).glob("*.distcp")))
    saving.finish()
    assert load_checkpoint(files.checkpoint_path(1), run.trainer.model, run.trainer.optimizer)["sampler"] == {"at": 1}
    seen["as saved"] = moved and all(torch.equal(*both) for both in zip(saved, _weights(run), strict=True))
    run.close()
    return seen


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    line = arguments(output=tmp_path, data__path=tmp_path / "texts", checkpoint__keep=9)
    one, two = run_ranks(2, _background, line, tmp_path / "run")
    assert one == two
    assert one.pop("said").startswith(f"{tmp_path}/run/checkpoints/step_000003 could not be written by rank 1 (")
    assert one == {
        "held up": [],
        "the first is done": 1,
        "both are done": [1, 2],
        "failed": True,
        "left": False,
        "written at once": 2,
        "as saved": True,
    }
