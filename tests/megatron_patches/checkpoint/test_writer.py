"""Checkpoints are written by the processes that train: a process that uses a GPU must not be forked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from distca.errors import ConfigError
from distca.testing.ranks import run_ranks
from distca.train.config.cli import parse_run_config
from tests.train.small_runs import StepByStep, arguments, write_texts


def _after_one_step(line: list[str]) -> StepByStep:
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    run = StepByStep(parse_run_config(line))
    run.run(run.step())
    run.trainer.optimizer.step()
    return run


def _save(line: list[str], folder: Path) -> tuple[list[int], int]:
    """Save a run's state with no way to start a process; returns the bytes of the files, and this rank's number."""
    import multiprocessing.process
    import os

    from megatron_patches.checkpoint.save_load import load_checkpoint, save_checkpoint

    def refuse(*_: object) -> None:
        raise AssertionError("a process was started")

    run = _after_one_step(line)
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    os.fork = refuse  # type: ignore[assignment]
    multiprocessing.process.BaseProcess.start = refuse  # type: ignore[method-assign]
    save_checkpoint(folder, run.trainer.model, run.trainer.optimizer, {"step": 1})
    assert load_checkpoint(folder, run.trainer.model, run.trainer.optimizer)["step"] == 1
    run.close()
    other = StepByStep(parse_run_config([*line, "--model.layers", "2"]))
    with pytest.raises(ConfigError, match=r"saved does not fit this run: it has shape \[4, .* for decoder\.layers\."):
        load_checkpoint(folder, other.trainer.model, other.trainer.optimizer)
    other.close()
    return [file.stat().st_size for file in sorted(folder.glob("*.distcp"))], dist.get_rank()


def test_nothing_is_forked_and_all_ranks_write_about_as_much(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    line = arguments(output=tmp_path, data__path=tmp_path / "texts", model__layers=4)
    ((sizes, _), *others) = run_ranks(4, _save, line, tmp_path / "saved")
    assert len(sizes) == 4 and len(others) == 3
    # One of this small model's matrices is much of a rank's part.
    assert min(sizes) > 0.4 * max(sizes)


def _said_of_saving(line: list[str], folder: Path) -> str:
    """What a rank says when a run of one step is saved."""
    from distca.errors import CheckpointError
    from distca.train.checkpoint.saver import Saver
    from distca.train.run.run_folder import RunFolder

    run = _after_one_step(line)
    try:
        Saver(run.trainer, RunFolder(folder)).save(1, {}, wait=True)
    except CheckpointError as error:
        return str(error)
    return "saved"


def _save_too_much(line: list[str], folder: Path) -> str:
    import resource
    import signal

    # Files cannot grow further, as on a full disk, on one rank only: its part of a checkpoint has 330 KB, the file that
    # ranks meet in some 10.
    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    return _said_of_saving(line, folder)


def test_a_checkpoint_that_one_rank_cannot_write_is_one_sentence_on_all(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    line = arguments(output=tmp_path, data__path=tmp_path / "texts")
    one, two = run_ranks(2, _save_too_much, line, tmp_path)
    assert one == two
    assert f"{tmp_path}/checkpoints/step_000001 could not be written by rank 1 (" in one and "are free there." in one
    assert "\n" not in one
    assert not (tmp_path / "checkpoints/step_000001").exists(), "what was written of it takes room that is needed"


def _save_apart(line: list[str], folder: Path) -> str:
    own = folder / f"node{dist.get_rank()}"
    (own / "checkpoints/step_000001").mkdir(parents=True)
    return _said_of_saving(line, own)


def test_nodes_that_do_not_share_the_folder_have_no_complete_checkpoint(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    line = arguments(output=tmp_path, data__path=tmp_path / "texts")
    one, two = run_ranks(2, _save_apart, line, tmp_path)
    assert one == two
    assert "Rank 1 wrote __1_0.distcp of " in one and "their nodes do not share this folder" in one
    assert not list(tmp_path.rglob("COMPLETE"))
