"""Runs on file systems that are full or can only be read."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from distca.errors import CheckpointError, ConfigError
from distca.testing.ranks import run_ranks
from distca.train.config.cli import parse_run_config
from distca.train.run.run_folder import create_run_folder
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


def test_a_disk_that_can_only_be_read_is_a_sentence(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    config = parse_run_config(arguments(output=disk, name="run"))
    with pytest.raises(ConfigError, match=f"output is {disk}, but nothing can be written into .*Read-only"):
        create_run_folder(config)
