"""Reading JSON files that others wrote: only regular ones, and only what has one meaning."""

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
    """A file, opened to read bytes. A named pipe would wait for who writes into it, and a device may never end.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return os.fdopen(descriptor, "rb")


def read_json(path: str | os.PathLike[str]) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it is not UTF-8 or no JSON, is nested too deep, or names something twice in one object; or it has a
            number or a text that JSON does not have (NaN, Infinity, 1e999, half of a surrogate pair).
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
    """The same, of a file that holds an object.

    Raises:
        OSError: as in :func:`read_json`.
        ValueError: as in :func:`read_json`, or it holds something else.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not an object")
    return content


def inside(folder: Path, name: Any) -> Path:
    """A file that another file of the folder names.

    Raises:
        ValueError: the name leads out of the folder, or is none.
    """
    if not isinstance(name, str) or "\0" in name or name in ("", "..") or Path(name).name != name:
        raise ValueError(f"it names {name!r}, which is no file of that folder")
    return folder / name


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise ValueError(f"it has {twice!r} twice in one object")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it has the number {text}")
    return value


def _check_text(content: Any) -> None:
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it has a text with half of a surrogate pair") from None
