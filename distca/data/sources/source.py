"""The interface of every document source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from distca.errors import DataError, system_words

BYTE_VOCABULARY = 256


@contextmanager
def readable() -> Iterator[None]:
    """A file or folder that cannot be read in here is a DataError, which names it."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{error.filename or 'A file'} cannot be read ({system_words(error)}); make it readable or remove it."
        ) from None


class DocumentSource(Protocol):
    """Documents of known length, of which any token range can be read by itself.

    Attributes:
        lengths: [D] int64 tokens per document, each at least 1, known without reading tokens.
        vocabulary: token ids are in [0, vocabulary).
    """

    @property
    def lengths(self) -> np.ndarray: ...

    @property
    def vocabulary(self) -> int: ...

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64 tokens [start, stop) of ``document``."""
        ...

    def where(self, document: int) -> str:
        """Words by which a user finds ``document``: its file, and its place there."""
        ...
