"""The recipe that makes token ids of documents: tokenizer, field, and what a document is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from distca.data.sources.json_lines import NoTextError, utf8_of
from distca.data.tokenizer import Tokenizer, TokenizerFiles

Encoded = tuple[np.ndarray, np.ndarray | None]
"""Ids of a document, and which of them are to be learned; None for all."""


class Encoder(Protocol):
    """Turns documents into ids; can be pickled."""

    @property
    def vocabulary(self) -> int: ...

    def encode(self, values: Sequence[Any]) -> list[Encoded]:
        """Ids of every document, as a block of texts has it; ValueError if one of them cannot be encoded."""
        ...


@dataclass(frozen=True)
class TextEncoder:
    """Texts through a tokenizer."""

    tokenizer: Tokenizer
    field: str = "text"

    @property
    def vocabulary(self) -> int:
        return self.tokenizer.vocabulary

    def encode(self, values: Sequence[Any]) -> list[Encoded]:
        return [(ids, None) for ids in self.tokenizer.encode([self._bytes(value) for value in values])]

    def _bytes(self, value: Any) -> bytes:
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str):
            raise NoTextError(f'its "{self.field}" is no text')
        return utf8_of(value, self.field)


@dataclass(frozen=True)
class Recipe:
    """How documents become ids.

    Attributes:
        tokenizer: of the texts.
        field: of a JSON object, or column of a table, that holds the document.
    """

    tokenizer: TokenizerFiles
    field: str = "text"

    @property
    def beside(self) -> tuple[str, ...]:
        """Fields that are read too, where documents have them."""
        return ()

    def open(self) -> Encoder:
        """Returns the encoder of this recipe; raises the errors of ``TokenizerFiles.open``."""
        return TextEncoder(self.tokenizer.open(), self.field)

    def identity(self) -> dict[str, Any]:
        """Returns all that the ids depend on, wherever the tokenizer lies."""
        return {
            "tokenizer_digest": self.tokenizer.digest(),
            "begin_token": self.tokenizer.begin,
            "end_token": self.tokenizer.end,
            "field": self.field,
        }
