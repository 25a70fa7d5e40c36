"""What every document source offers."""

from __future__ import annotations

from typing import Protocol

import numpy as np

BYTE_VOCABULARY = 256


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
