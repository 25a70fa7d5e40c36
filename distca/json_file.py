"""Reads JSON files from outside, such as cost tables, more strictly than Python's ``json``.

Errors are phrases such as "it is nested too deep", in which "it" is the file; callers put its name before them.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Opens a regular file to read bytes. Reading a named pipe might wait forever, and reading a device might not end.

    Raises:
        OSError: the path cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return os.fdopen(descriptor, "rb")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Returns the content of a JSON file.

    Raises:
        OSError: the file cannot be read, or is no regular file.
        ValueError: the file is not UTF-8, is no JSON, or is nested too deep; an object has two entries of one name; or
            there is a number or a text that JSON does not have (NaN, Infinity, 1e999, half of a surrogate pair).
    """
    with open_regular(path) as file:
        text = file.read().decode("utf-8")
    try:
        content = json.loads(text, object_pairs_hook=_named_once, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if "\\ud" in text.lower():
        _check_text(content)
    return content


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the content of a JSON file that has to be an object.

    Raises:
        OSError: as in :func:`read_json`.
        ValueError: as in :func:`read_json`, or the content is no object.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not an object")
    return content


def inside(folder: Path, name: Any) -> Path:
    """Returns the path of a file in ``folder``, whose ``name`` was read from another file there.

    Raises:
        ValueError: the name leads out of the folder, or is no file name.
    """
    if not isinstance(name, str) or "\0" in name or name in ("", "..") or Path(name).name != name:
        raise ValueError(f"it names {name!r}, which is no file of that folder")
    return folder / name


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object's entries; refuses two entries of one name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise ValueError(f"it has {twice!r} twice in one object")
    return found


def _finite(text: str) -> float:
    """Returns the number of a text; refuses infinity and nan."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it has the number {text}")
    return value


def _check_text(content: Any) -> None:
    """Refuses texts that cannot be written as UTF-8."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it has a text with half of a surrogate pair") from None
