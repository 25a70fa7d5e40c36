"""Reads a checkpoint's ``.metadata`` without running code in it.

The file ``.metadata`` describes the tensors of torch's distributed checkpoints: their shapes, and the files of their
parts. It is a pickle, a small program that could call any function. So ``_Machine`` runs only operations that make
plain data, and records a class's name and arguments in place of an object. Then ``_Builder`` checks all types and
builds torch's objects.
"""

from __future__ import annotations

import math
import pickletools
from collections import Counter
from collections.abc import Callable
from copy import copy
from functools import lru_cache, partial
from itertools import product
from pathlib import Path, PurePath
from pickle import UnpicklingError
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

_TORCH = "torch.distributed.checkpoint.metadata."
_PATHS = ("pathlib.Path", "pathlib.PosixPath", "pathlib._local.PosixPath")
"""Names of the class of paths in different versions of Python. The pickle has a path, the checkpoint's own, which
loading ignores."""
_MADE = {f"{_TORCH}{name}" for name in ("Metadata", "StorageMeta", "MetadataIndex", "TensorProperties")}
_MADE |= {f"{_TORCH}{kind}StorageMetadata" for kind in ("Bytes", "Chunk", "Tensor")}
_MADE |= {"torch.distributed.checkpoint.filesystem._StorageInfo"}
"""Classes of which the pickle makes objects without arguments, and then sets the objects' fields."""
_CALLED = {*_PATHS, "torch.Size", "torch.serialization._get_layout", f"{_TORCH}_MEM_FORMAT_ENCODING"}
"""Classes and functions that the pickle calls with arguments. Calls are recorded, not made."""
_DIMENSIONS = 64
"""The most dimensions of a tensor; a file with more is refused."""
_CUTS = 8
"""The most dimensions along which a tensor is cut into parts; a file with more is refused. Each such dimension doubles
the time of ``_is_whole``. The number was chosen, not measured."""


class _Name(NamedTuple):
    text: str


class _Record:
    """A pickle's description of an object.

    Attributes:
        name: full name of the class or function that Python's unpickler would call.
        arguments: the arguments of that call.
        state: the object's fields; None until the pickle sets them.
    """

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments, self.state = name, arguments, None


def read_metadata(file: BinaryIO) -> Metadata:
    """Returns the content of a checkpoint's ``.metadata``.

    Raises:
        UnpicklingError: the file does not describe a checkpoint, or contains code, which was not run.
    """
    return copy(_built(file.read()))  # torch's reader sets a field of the result, and the cached one must not change


@lru_cache(maxsize=1)
def _built(pickled: bytes) -> Metadata:
    """Returns what the pickle describes. The last result is cached, because loading reads the file several times."""
    try:
        return _Builder().metadata(_Machine().run(pickled))
    except UnpicklingError:
        raise
    except Exception as error:  # garbage can raise nearly any error
        words = str(error).splitlines() or [type(error).__name__]
        raise UnpicklingError(f"it cannot be read ({words[0]})") from None


def forget_metadata() -> None:
    """Frees the result that :func:`read_metadata` keeps."""
    _built.cache_clear()


def check_files(checkpoint: Path, metadata: Metadata) -> None:
    """Compares ``metadata`` with the files in the folder ``checkpoint``.

    Raises:
        UnpicklingError: the parts of a tensor do not make up its shape; a file is missing or too short; or a tensor has
            more bytes than all parts together take in their files.
    """
    ends: dict[str, int] = {}  # for each file, where its last part ends, in bytes
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        file = checkpoint / name
        if not file.is_file():
            raise UnpicklingError(f"{name} is missing, or is no regular file")
        if file.stat().st_size < end:
            raise UnpicklingError(f"{name} has {file.stat().st_size:,} bytes, but must have {end:,}")
    for name, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata) and not _is_whole(tensor):
            raise UnpicklingError(
                f"the parts of {name} do not make up its shape {list(tensor.size)}, or cut more than {_CUTS} dimensions"
            )
        if isinstance(tensor, TensorStorageMetadata) and _bytes(tensor) > sum(ends.values()):
            raise UnpicklingError(f"{name} has shape {list(tensor.size)}, for which its parts are too small")


def _is_whole(tensor: TensorStorageMetadata) -> bool:
    """Whether each element of a tensor is in exactly one of its parts, which are boxes.

    A box with n dimensions has 2^n corners: in each dimension a corner is at the box's begin or end. A corner counts 1,
    or -1 if it is at the end in an odd number of dimensions. At each point the counts of the parts' corners are added
    up. The parts are complete if the sums equal the counts of the whole tensor's corners.

    Example in one dimension: parts [0, 2) and [2, 5) count 1 at point 0, 1 - 1 = 0 at point 2, and -1 at point 5. The
    whole tensor [0, 5) counts 1 at point 0 and -1 at point 5.
    """
    parts, size = tensor.chunks, tensor.size
    if any(len(part.offsets) != len(size) or len(part.sizes) != len(size) for part in parts):
        return False
    # Along dimensions that are not in ``cut``, every part is as long as the tensor and must begin at 0.
    cut = [dim for dim, whole in enumerate(size) if any(part.sizes[dim] != whole for part in parts)]
    if any(begin for part in parts for dim, begin in enumerate(part.offsets) if dim not in cut) or len(cut) > _CUTS:
        return False
    if not math.prod(size):
        return not any(math.prod(part.sizes) for part in parts)
    signs: Counter[tuple[int, ...]] = Counter()
    boxes = [([part.offsets[dim] for dim in cut], [part.sizes[dim] for dim in cut], 1) for part in parts]
    for begins, sizes, sign in [*boxes, ([0 for _ in cut], [size[dim] for dim in cut], -1)]:
        for ends in product((0, 1), repeat=len(cut)):
            corner = tuple(begin + end * width for begin, end, width in zip(begins, ends, sizes, strict=True))
            signs[corner] += sign * (-1) ** sum(ends)
    return not any(signs.values())


def _bytes(tensor: TensorStorageMetadata) -> int:
    return math.prod(tensor.size) * tensor.properties.dtype.itemsize


class _Machine:
    """Runs a pickle's operations that make data, with a stack like Python's unpickler, and refuses all others."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        plain = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
        fixed = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
        self._operations: dict[str, Callable[[Any], object]] = {
            **dict.fromkeys(plain, self._push),
            **{name: partial(self._push_fixed, value) for name, value in fixed.items()},
            **{f"TUPLE{size}": partial(self._tuple, size) for size in (1, 2, 3)},
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
            "STOP": lambda _: None,
            "MARK": lambda _: self._mark(),
            "EMPTY_LIST": lambda _: self._push([]),
            "EMPTY_DICT": lambda _: self._push({}),
            "TUPLE": lambda _: self._push(tuple(self._to_mark())),
            "APPEND": lambda _: self._append([self._stack.pop()]),
            "APPENDS": lambda _: self._append(self._to_mark()),
            "SETITEM": lambda _: self._set([self._stack.pop(-2), self._stack.pop()]),
            "SETITEMS": lambda _: self._set(self._to_mark()),
            "BINPUT": self._put,
            "LONG_BINPUT": self._put,
            "MEMOIZE": lambda _: self._put(len(self._memo)),
            "BINGET": lambda number: self._push(self._memo[number]),
            "LONG_BINGET": lambda number: self._push(self._memo[number]),
            "GLOBAL": lambda names: self._name(*names.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._name(self._stack.pop(-2), self._stack.pop()),
            "NEWOBJ": lambda _: self._make(_MADE),
            "REDUCE": lambda _: self._make(_CALLED),
            "BUILD": lambda _: self._say_state(self._stack.pop()),
        }

    def run(self, pickled: bytes) -> Any:
        """Returns the pickled data; a :class:`_Name` stands for a class or dtype, a :class:`_Record` for an object."""
        for operation, argument, _ in pickletools.genops(pickled):
            do = self._operations.get(operation.name)
            if do is None:
                raise UnpicklingError(f"its operation {operation.name} is no part of a checkpoint and was not run")
            do(argument)
        (made,) = self._stack
        return made

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _push_fixed(self, value: Any, _: Any) -> None:
        self._stack.append(value)

    def _mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _to_mark(self) -> list[Any]:
        above, self._stack = self._stack, self._marks.pop()
        return above

    def _tuple(self, size: int, _: Any) -> None:
        self._stack[-size:] = [tuple(self._stack[-size:])]

    def _put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _append(self, values: list[Any]) -> None:
        _of(list, self._stack[-1]).extend(values)

    def _set(self, pairs: list[Any]) -> None:
        """Adds ``pairs`` (key, value, key, value and so on) to the dict on top of the stack."""
        names = pairs[::2]
        # Hashing deeply nested tuples would crash Python.
        if not all(isinstance(name, str | _Record) for name in names):
            raise UnpicklingError("it has a dict with a key that is neither text nor an object")
        _of(dict, self._stack[-1]).update(zip(names, pairs[1::2], strict=True))

    def _name(self, module: str, name: str) -> None:
        text = f"{module}.{name}"
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if text not in _MADE | _CALLED and not is_dtype and text != "collections.OrderedDict":
            raise UnpicklingError(f"it names {text}, which is no part of a checkpoint and was not run")
        self._push(_Name(text))

    def _make(self, allowed: set[str]) -> None:
        arguments, name = _of(tuple, self._stack.pop()), _of(_Name, self._stack.pop())
        if name.text == "collections.OrderedDict" and not arguments:
            self._push({})
        elif name.text in allowed:
            self._push(_Record(name.text, arguments))
        else:
            raise UnpicklingError(f"it makes a {name.text}, which is no part of a checkpoint and was not run")

    def _say_state(self, state: Any) -> None:
        record = _of(_Record, self._stack[-1])
        if record.state is not None or record.name not in _MADE:
            raise UnpicklingError(f"it sets fields of a {record.name}, which is no part of a checkpoint")
        record.state = state


class _Builder:
    def __init__(self) -> None:
        self._properties: dict[int, TensorProperties] = {}  # by id() of the record, which many tensors share
        self._parts_left = 0  # number of parts of tensors that the pickle may still describe

    def metadata(self, made: Any) -> Metadata:
        """Returns torch's ``Metadata`` for a record, with the fields that loading reads."""
        if not isinstance(made, _Record) or made.name != f"{_TORCH}Metadata":
            raise UnpicklingError("it is no metadata of a checkpoint")
        said = _fields(made, "Metadata")
        stored = {_index(key): _info(each) for key, each in _of(dict, said["storage_data"]).items()}
        self._parts_left = len(stored)
        described = {_of(str, key): self._stored(each) for key, each in _of(dict, said["state_dict_metadata"]).items()}
        return Metadata(described, storage_data=stored, version=_maybe(str, said.get("version")))

    def _stored(self, made: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if _of(_Record, made).name == f"{_TORCH}BytesStorageMetadata":
            return BytesStorageMetadata()
        said = _fields(made, "TensorStorageMetadata")
        parts = _of(list, said["chunks"])
        self._parts_left -= len(parts)
        # In a small pickle many tensors could share one long list of parts. To build it for each could take hours.
        if self._parts_left < 0:
            raise UnpicklingError("it has more parts of tensors than places in files")
        return TensorStorageMetadata(
            self._of_tensor(said["properties"]), _shape(said["size"]), [_chunk(part) for part in parts]
        )

    def _of_tensor(self, made: Any) -> TensorProperties:
        if (known := self._properties.get(id(made))) is not None:
            return known
        dtype, layout, gradient, _, pinned = _of(tuple, _record(made, "TensorProperties").state)
        if _of(_Record, layout).arguments != ("torch.strided",):
            raise UnpicklingError("it has a tensor that is not dense")
        found = vars(torch)[_of(_Name, dtype).text.removeprefix("torch.")]
        properties = TensorProperties(
            _of(torch.dtype, found), requires_grad=_of(bool, gradient), pin_memory=_of(bool, pinned)
        )
        return self._properties.setdefault(id(made), properties)


def _chunk(made: Any) -> ChunkStorageMetadata:
    said = _fields(made, "ChunkStorageMetadata")
    return ChunkStorageMetadata(_shape(said["offsets"]), _shape(said["sizes"]))


def _index(made: Any) -> MetadataIndex:
    said = _fields(made, "MetadataIndex")
    offset = said.get("offset")
    return MetadataIndex(
        _of(str, said["fqn"]), None if offset is None else _shape(offset), _maybe(int, said.get("index"))
    )


def _info(made: Any) -> _StorageInfo:
    """Returns a part's file, and the part's offset and length there in bytes.

    Files in other folders are refused. So are parts that were transformed for storage, for example compressed."""
    if _of(_Record, made).name != "torch.distributed.checkpoint.filesystem._StorageInfo":
        raise UnpicklingError(f"it has a {made.name} in place of a _StorageInfo")
    said = _of(dict, made.state)
    name, offset, length = _of(str, said["relative_path"]), _of(int, said["offset"]), _of(int, said["length"])
    if not name or PurePath(name).name != name or name == ".." or "\0" in name:
        raise UnpicklingError(f"it names {name!r}, which is no file of the checkpoint")
    if min(offset, length) < 0 or said.get("transform_descriptors"):
        raise UnpicklingError(f"it has a part of {name} that cannot be read")
    return _StorageInfo(name, offset, length)


def _shape(made: Any) -> torch.Size:
    sizes = made
    if isinstance(made, _Record) and made.name == "torch.Size":
        (sizes,) = made.arguments
    if len(_of(tuple, sizes)) > _DIMENSIONS:
        raise UnpicklingError(f"it has a tensor of {len(sizes)} dimensions, and at most {_DIMENSIONS} are read")
    found = torch.Size(_of(int, size) for size in sizes)
    if min(found, default=0) < 0:
        raise UnpicklingError("it has a negative size")
    return found


def _record(made: Any, name: str) -> _Record:
    record = _of(_Record, made)
    if record.name != f"{_TORCH}{name}" or record.arguments:
        raise UnpicklingError(f"it has a {record.name} in place of a {name}")
    return record


def _fields(made: Any, name: str) -> dict[str, Any]:
    fields: dict[str, Any] = _of(dict, _record(made, name).state)
    return fields


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise UnpicklingError(f"it has a {type(value).__name__} in place of a {kind.__name__}")
    return value


def _maybe(kind: type, value: Any) -> Any:
    return None if value is None else _of(kind, value)
