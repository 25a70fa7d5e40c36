"""The content of a folder's safetensors files, from their headers and bytes; needs no package."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distca.errors import ModelError, system_words

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BODY = "model"
"""The first word of the names of all tensors but the output layer's."""
_WRAPPED = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("backbone.", "model."),
)
"""How models of several parts name the text part's tensors, and what these are called without the others. Folders of
Nemotron-H have another name of its body than its class."""
_HEADER_BYTES = 100 << 20
"""A header is never longer."""
_CHUNK = 1 << 24
"""Bytes that are compared at a time."""


def layer_prefix(number: int) -> str:
    """Returns the beginning of the names of a layer's tensors, dot included."""
    return f"{BODY}.layers.{number}."


def piece_name(tensor: str, number: int) -> str:
    """The name of a piece of a tensor: what it holds at ``number`` of its first dimension.

    Where a folder has one tensor for all experts of a layer, each expert's is a piece."""
    return f"{tensor}#{number}"


def tensor_and_piece(name: str) -> tuple[str, int | None]:
    """The tensor that a name stands for a piece of, and which; of the name of a whole tensor no number."""
    tensor, hash_sign, number = name.partition("#")
    return tensor, int(number) if hash_sign else None


def plain_name(stored: str) -> str:
    """The name of a tensor as a folder of the text part alone has it."""
    for wrapped, plain in _WRAPPED:
        if stored.startswith(wrapped):
            return plain + stored.removeprefix(wrapped)
    return stored


def has_single(folder: Path) -> bool:
    """Whether all of a folder's tensors are in one file. Such a file goes before an index, as in transformers: an index
    beside it is that of files that were there before."""
    return (folder / SINGLE).is_file()


def has_tensor(folder: Path, plain: str) -> bool:
    """Whether a folder's index, or its only file, has a tensor of that name; false where neither can be read."""
    try:
        if has_single(folder):
            names = _header(folder / SINGLE)[0]
        else:
            names = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return plain in map(plain_name, names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        return False


def same_bytes(first: Path, name: str, second: Path, other: str) -> bool:
    """Whether two tensors are alike: type, shape and every byte.

    Args:
        first: the file of the first one.
        name: its name there.
        second: the file of the second one, which may be the same.
        other: its name there.

    Raises:
        ModelError: a file cannot be read.
    """
    try:
        (own, begin), (theirs, start) = _entry(first, name), _entry(second, other)
        if any(own[key] != theirs[key] for key in ("dtype", "shape")):
            return False
        size = own["data_offsets"][1] - own["data_offsets"][0]
        with first.open("rb") as left, second.open("rb") as right:
            left.seek(begin)
            right.seek(start)
            for done in range(0, size, _CHUNK):
                length = min(_CHUNK, size - done)
                if left.read(length) != right.read(length):
                    return False
        return True
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read ({system_words(error)}).") from None
    except (ValueError, KeyError, TypeError, struct.error):
        raise ModelError(f"{first} or {second} is no whole safetensors file, perhaps cut short.") from None


def _entry(file: Path, name: str) -> tuple[Mapping[str, Any], int]:
    """Returns a header's entry for a tensor, and the byte of the file at which the tensor begins."""
    header, data = _header(file)
    return header[name], data + header[name]["data_offsets"][0]


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """A file's header, and where its data begin."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > _HEADER_BYTES:
            raise ValueError("no header")
        return json.loads(opened.read(length)), 8 + length
