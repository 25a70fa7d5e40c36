"""What a checkpoint may hold, and what is never run."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, filesystem, save
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from megatron_patches.checkpoint.unpickling import check_small_files, only_data


class _Runs:
    """Runs a shell command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_torchs_own_metadata_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16), "c": io.BytesIO(b"x")}
    save(tensors, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    with only_data():
        found = FileSystemReader(tmp_path).read_metadata()
    assert isinstance(found, Metadata) and set(found.state_dict_metadata) == {"a", "b", "c"}


def test_a_command_in_the_metadata_is_not_run(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Runs(tmp_path / "ran")))
    with (
        only_data(),
        pytest.raises(pickle.UnpicklingError, match=r"names posix\.system, which is no part of a checkpoint"),
    ):
        FileSystemReader(tmp_path).read_metadata()
    assert not (tmp_path / "ran").exists()
    with pytest.raises(AttributeError):
        FileSystemReader(tmp_path).read_metadata()
    assert (tmp_path / "ran").exists(), "without it the file was made: this test shows something"


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x04K\x01", pickle.dumps(1), None])
def test_metadata_that_is_garbage_is_one_error(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(pickle.UnpicklingError):
        check_small_files(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metadata.json", b""),
        ("metadata.json", b'{"sharded_backend": [], "sharded_backend_version": 1}'),
        ("metadata.json", b'{"sharded_jackend": "torch_dist"}'),
        ("common.pt", b"PK garbage"),
    ],
)
def test_other_small_files_that_are_garbage_are_one_error(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(pickle.UnpicklingError, match=f"^{name}"):
        check_small_files(tmp_path)
    (tmp_path / name).unlink()
    check_small_files(tmp_path)


def test_a_command_in_an_object_is_not_run(tmp_path: Path) -> None:
    written = io.BytesIO()
    torch.save(_Runs(tmp_path / "ran"), written)
    written.seek(0)
    planner: Any = DefaultLoadPlanner(flatten_state_dict=False)
    planner.state_dict = {}
    item = SimpleNamespace(dest_index=SimpleNamespace(fqn="object"))
    with only_data(), pytest.raises(pickle.UnpicklingError):
        planner.load_bytes(item, written)
    assert not (tmp_path / "ran").exists() and planner.state_dict == {}


def test_torch_is_as_before_afterwards() -> None:
    before = filesystem.pickle, DefaultLoadPlanner.load_bytes
    with pytest.raises(RuntimeError), only_data():
        raise RuntimeError
    assert (filesystem.pickle, DefaultLoadPlanner.load_bytes) == before
