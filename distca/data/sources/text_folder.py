"""A folder of text files, one document each."""

from __future__ import annotations

import logging
from pathlib import Path

from distca.data.sources.files import FileBytes, walk
from distca.errors import DataError

logger = logging.getLogger(__name__)

_SUFFIXES = (
    ".txt .text .md .rst .tex .org .html .htm .xml .csv .tsv .log"
    " .py .pyi .c .h .cc .cpp .hpp .cu .cuh .java .kt .scala .js .ts .go .rs .rb .php .swift .cs .lua .jl .r .sh .sql"
    " .yaml .yml .toml .ini .cfg"
)
TEXT_SUFFIXES = frozenset(_SUFFIXES.split())


def open_text_folder(path: str) -> FileBytes:
    """The text files below ``path``, as bytes, in the order of their relative path.

    A text file is one whose name ends, in either case, in one of TEXT_SUFFIXES. Hidden files and folders (names that
    begin with a dot) and links are left out. If ``path`` is a file it is the only document, whatever its name.

    Raises:
        DataError: if ``path`` does not exist or holds no text file with content.
    """
    folder = Path(path)
    if folder.is_file():
        return FileBytes([folder], str(folder))
    if not folder.is_dir():
        raise DataError(f"data.path {path!r} does not exist.")
    files = list(walk(folder, lambda name: name.startswith(".")))
    texts = [file for file in files if file.suffix.lower() in TEXT_SUFFIXES and not file.name.startswith(".")]
    if not texts:
        raise DataError(
            f"The folder {path!r} holds no text file: none of its {len(files)} files has a known text suffix such as "
            ".txt, .md or .py; set data.path to another folder."
        )
    if len(texts) < len(files):
        logger.info("%s: left out %d hidden files or files without a text suffix", path, len(files) - len(texts))
    return FileBytes(texts, f"The folder {path!r}")
