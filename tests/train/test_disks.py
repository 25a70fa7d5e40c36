"""Runs on file systems that are full or can only be read."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from distca.errors import CheckpointError, ConfigError
from distca.testing.ranks import run_ranks
from distca.train.config.cli import parse_run_config
from distca.train.run.folder_choice import create_run_folder
from distca.train.run.run_folder import RunFolder
from tests.train.small_runs import arguments, train_all, write_texts


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own, in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1300k", "none", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def _saved(line: list[str]) -> str:
    try:
        train_all([line])
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_disk_that_gets_full_is_a_sentence_on_all_ranks_and_keeps_what_was_complete(disk: Path) -> None:
    """A checkpoint of this model has about 750 KB, so the second one does not fit; it is written in the background."""
    write_texts(disk.parent / "texts")
    line = arguments(output=disk, name="run", data__path=disk.parent / "texts", checkpoint__save_every=2)
    one, two = run_ranks(2, _saved, line)
    assert one == two
    assert "step_000004 could not be written by rank" in one and "No space left on device" in one, one
    assert [each.name for each in (disk / "run/checkpoints").iterdir()] == ["step_000002"]


def _trained(line: list[str], disk: Path) -> list[int]:
    """Steps in metrics.jsonl of a run whose disk is full after the start, until its last step but one."""
    from distca.train.metrics.writer import MetricsWriter, read_metrics

    filler, log = disk / "filler", MetricsWriter.log

    def fill(writer: MetricsWriter, step: int, values: dict[str, Any]) -> None:
        if step == 2:
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        if step == 20:
            filler.unlink()
        log(writer, step, values)

    MetricsWriter.log = fill  # type: ignore[method-assign]
    train_all([line])
    return [line["step"] for line in read_metrics(disk / "run")]


def test_a_full_disk_between_checkpoints_ends_no_run(disk: Path) -> None:
    write_texts(disk.parent / "texts")
    settings = {"train__steps": 20, "log__timeline_steps": "[3, 3]", "log__tensorboard": True, "log__every": 1}
    line = arguments(
        output=disk, name="run", data__path=disk.parent / "texts", checkpoint__save_at_end=False, **settings
    )
    (steps,) = run_ranks(1, _trained, line, disk)
    assert steps == list(range(1, 21))


def test_a_log_on_a_full_disk_is_one_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from distca.train.run.record import rank_log

    monkeypatch.setattr(logging.getLogger(), "handlers", [caplog.handler])  # none of another test's closed console
    file = tmp_path / "console.log"
    file.symlink_to("/dev/full")
    with rank_log(cast("RunFolder", SimpleNamespace(log_of=lambda rank: file)), 0):
        for line in ("one", "two"):
            logging.getLogger("distca").warning(line)
    said = f"{file} cannot be written (No space left on device); lines may be missing there."
    assert sorted(caplog.messages) == [said, "one", "two"]
    assert "Traceback" not in capsys.readouterr().err


def test_a_disk_that_can_only_be_read_is_a_sentence(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    config = parse_run_config(arguments(output=disk, name="run"))
    with pytest.raises(ConfigError, match=f"output is {disk}, but nothing can be written into .*Read-only"):
        create_run_folder(config)
