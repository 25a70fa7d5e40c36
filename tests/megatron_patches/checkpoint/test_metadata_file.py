"""A checkpoint's .metadata is data: what torch writes is read alike, and no operation of pickle reaches a class."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, metadata, save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from distca.errors import DistcaError
from distca.testing.ranks import forked
from megatron_patches.checkpoint.metadata_file import _StorageInfo, check_files, read_metadata
from tests.train.small_runs import arguments

_BYTES = (metadata.__name__, "BytesStorageMetadata")
_PATH = ("pathlib", "PosixPath")


def _name(name: tuple[str, str]) -> bytes:
    return pickle.GLOBAL + "{}\n{}\n".format(*name).encode()


def _text(text: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(text)) + text.encode()


def _changes(owner: bytes, attribute: str, value: bytes) -> bytes:
    """The second of BUILD's two states is given to setattr."""
    state = pickle.NONE + pickle.EMPTY_DICT + _text(attribute) + value + pickle.SETITEM + pickle.TUPLE2
    return owner + state + pickle.BUILD


def _deletes_working_folder(content: bytes) -> bytes:
    """A .metadata after which every folder seems to hold "." without end."""
    wrong = [
        _changes(_name(_BYTES), "__iter__", _name(_BYTES)),
        _changes(_name(_BYTES), "__next__", _name(_PATH)),
        _changes(_name(_PATH), "iterdir", _name(_BYTES)),
    ]
    body = pickle.dumps(pickle.loads(content), protocol=2)
    return body[:2] + b"".join(each + pickle.POP for each in wrong) + body[2:]


def _export(root: Path) -> None:
    """Export a crafted checkpoint, and write down what was said and what is left of the working folder."""
    from distca.train.checkpoint.command import export_weights
    from distca.train.config.cli import parse_run_config, to_yaml

    tensors = {"embedding.word_embeddings.weight": torch.ones(64, 32)}  # others are missing: it fails, and cleans up
    save(tensors, storage_writer=FileSystemWriter(root / "saved"), no_dist=True)
    saved = root / "saved" / ".metadata"
    saved.write_bytes(_deletes_working_folder(saved.read_bytes()))
    config = parse_run_config(arguments(model__vocabulary=64, model__hidden=32))
    (root / "saved" / "config.yaml").write_text(to_yaml(config))
    (root / "work" / "inner").mkdir(parents=True)
    (root / "work" / "inner" / "kept.txt").write_text("1")
    os.chdir(root / "work")
    said = ""
    try:
        export_weights(str(root / "saved"), output=str(root / "new" / "exported"))
    except DistcaError as error:
        said = str(error)
    with open(root / "said.json", "w", encoding="utf-8") as file:
        json.dump([said, os.listdir(root / "work")], file)


def test_an_export_deletes_nothing_of_the_working_folder(tmp_path: Path) -> None:
    process = forked(_export, tmp_path)
    process.join(60)
    said, left = json.loads((tmp_path / "said.json").read_text())
    assert left == ["inner"] and "it has a _Name in place of a _Record" in said
    assert not (tmp_path / "new").exists(), "what the export made is gone"


@pytest.mark.parametrize(
    "program",
    [
        _changes(_name(_BYTES), "is_dir", _name(_PATH)),
        _changes(_name(_PATH) + pickle.EMPTY_TUPLE + pickle.REDUCE, "_str", _text(".")),
        _changes(_name(("collections", "OrderedDict")), "get", _name(_PATH)),
        _name(_BYTES) + pickle.EMPTY_DICT + _text("is_dir") + _name(_PATH) + pickle.SETITEM + pickle.BUILD,
        _name(_BYTES) + _text("is_dir") + _name(_PATH) + pickle.SETITEM,
        _name(_PATH) + _text(".") + pickle.TUPLE1 + pickle.NEWOBJ,
        _name(_BYTES) + pickle.EMPTY_TUPLE + pickle.REDUCE,
        _name(_BYTES) + pickle.EMPTY_TUPLE + pickle.EMPTY_DICT + pickle.NEWOBJ_EX,
        pickle.MARK + _name(_PATH) + _text(".") + pickle.OBJ,
        pickle.MARK + _text(".") + pickle.INST + b"pathlib\nPosixPath\n",
        _name(("torch.serialization", "_get_layout")) + _text("torch.strided") + pickle.TUPLE1 + pickle.NEWOBJ,
        _name(("builtins", "getattr")) + pickle.EMPTY_TUPLE + pickle.REDUCE,
        _name((metadata.__name__, "os.system")) + _text("true") + pickle.TUPLE1 + pickle.REDUCE,
        _text(metadata.__name__) + _text("os") + pickle.STACK_GLOBAL,
        _name(("torch", "load")) + pickle.EMPTY_TUPLE + pickle.REDUCE,
        pickle.EXT1 + b"\x01",
        pickle.PERSID + b"1\n",
        pickle.LONG_BINPUT + b"\xff\xff\xff\xff",
        pickle.EMPTY_DICT + pickle.EMPTY_TUPLE + pickle.NONE + pickle.SETITEM,
        pickle.EMPTY_TUPLE + b"".join([pickle.TUPLE1] * 100_000),
        pickle.EMPTY_LIST + b"".join([pickle.EMPTY_LIST] * 100_000),
        b"",
    ],
)
def test_other_operations_are_refused(program: bytes) -> None:
    before = {kind: dict(vars(kind)) for kind in (BytesStorageMetadata, type(Path()))}
    with pytest.raises(pickle.UnpicklingError):
        read_metadata(io.BytesIO(pickle.PROTO + b"\x04" + program + pickle.STOP))
    assert before == {kind: dict(vars(kind)) for kind in before}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_writes_is_read_alike(tmp_path: Path, protocol: int) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16), "c": io.BytesIO(b"x")}
    save(tensors, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    own = pickle.loads((tmp_path / ".metadata").read_bytes())
    read = read_metadata(io.BytesIO(pickle.dumps(own, protocol)))
    assert read == replace(own, planner_data=None, storage_meta=None)
    check_files(tmp_path, read)


def _described(**changed: Any) -> bytes:
    size, whole = torch.Size([4, 2]), TensorProperties(torch.float32)
    parts = [ChunkStorageMetadata(torch.Size([begin, 0]), torch.Size([2, 2])) for begin in (0, 2)]
    fields = {"properties": whole, "size": size, "chunks": parts} | {
        name: each for name, each in changed.items() if name in ("properties", "size", "chunks")
    }
    place = {"relative_path": "file", "offset": 0, "length": 50} | {
        name: each for name, each in changed.items() if name not in fields
    }
    stored: Any = {MetadataIndex("w", part.offsets): _StorageInfo(**place) for part in parts}
    return pickle.dumps(Metadata({"w": TensorStorageMetadata(**fields)}, storage_data=stored))


def _chunks(*places: tuple[int, int]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size([begin, 0]), torch.Size([rows, 2])) for begin, rows in places]


_CORNER = ChunkStorageMetadata(torch.Size([0] * 9), torch.Size([1] * 9))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"relative_path": "../file"}, "names '../file', which is no file of the checkpoint"),
        ({"relative_path": "/etc/passwd"}, "no file of the checkpoint"),
        ({"relative_path": ".."}, "no file of the checkpoint"),
        ({"relative_path": ""}, "no file of the checkpoint"),
        ({"relative_path": Path("file")}, "has a _Record in place of a str"),
        ({"relative_path": "gone"}, "gone is missing, or is no regular file"),
        ({"relative_path": "pipe"}, "pipe is missing, or is no regular file"),
        ({"offset": -1}, "cannot be read"),
        ({"offset": 90}, "file has 100 bytes, but must have 140"),
        ({"length": 1.5}, "has a float in place of a int"),
        ({"transform_descriptors": ["zstd"]}, "cannot be read"),
        ({"size": torch.Size([5, 2])}, r"parts of w do not make up its shape \[5, 2\]"),
        ({"size": torch.Size([8])}, "do not make up"),
        ({"size": torch.Size([-4, -2])}, "negative size"),
        ({"size": (4, 2, "x")}, "has a str in place of a int"),
        ({"size": torch.Size([1] * 65)}, "65 dimensions, and at most 64 are read"),
        (
            {"size": torch.Size([2] * 9), "chunks": [_CORNER]},
            "do not make up its shape .* or cut more than 8 dimensions",
        ),
        ({"chunks": _chunks((0, 2), (0, 2))}, "do not make up"),
        ({"chunks": _chunks((0, 2), (3, 2))}, "do not make up"),
        ({"chunks": _chunks((0, 2))}, "do not make up"),
        ({"chunks": _chunks((0, 3), (1, 1))}, "do not make up"),
        ({"chunks": _chunks((0, 1), (1, 1), (2, 2))}, "more parts of tensors than places"),
        ({"size": torch.Size([2**40, 2]), "chunks": _chunks((0, 2**40))}, "for which its parts are too small"),
        ({"properties": 7}, "has a int in place of a _Record"),
    ],
)
def test_values_that_cannot_be_are_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    os.mkfifo(tmp_path / "pipe")
    check_files(tmp_path, read_metadata(io.BytesIO(_described())))
    with pytest.raises(pickle.UnpicklingError, match=said):
        check_files(tmp_path, read_metadata(io.BytesIO(_described(**changed))))


def test_a_list_that_many_tensors_share_is_refused_at_once() -> None:
    parts = _chunks(*((number, 1) for number in range(300)))
    one = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([300, 2]), parts)
    many: Any = {f"w{number}": replace(one) for number in range(300)}
    with pytest.raises(pickle.UnpicklingError, match="more parts of tensors than places in files"):
        read_metadata(io.BytesIO(pickle.dumps(Metadata(many, storage_data={}))))
