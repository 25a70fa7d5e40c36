"""The Python standard library as a corpus: real documents of very different lengths that every machine already has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from distca.data.sources.files import FileBytes, walk
from distca.errors import DataError

_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


def open_stdlib() -> FileBytes:
    """The .py files of the running interpreter's standard library, as bytes, in the order of their relative path.

    Installed packages are left out. The documents are the same wherever the same Python build runs; another version or
    distribution of Python has other files.

    Raises:
        DataError: if this interpreter comes without source files.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in walk(folder, _NOT_STDLIB.__contains__) if file.suffix == ".py"]
    if not files:
        raise DataError(
            f"This Python comes without the source of its standard library ({folder} has no .py files); "
            "set data.source to text and data.path to a folder of text files."
        )
    return FileBytes(files, f"The standard library ({folder})")
