"""Tokens of a text, made once and found again: by the files as they lie there, or by their content and the tokenizer.

CACHE/by_files/FILES.json      which tokens belong to files of this kind, path, size and time of change
CACHE/CONTENT/tokens.bin ...   tokens, by the content of the files and what the ids depend on
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distca.data.convert import convert
from distca.data.encoding import Bad, encode_block
from distca.data.recipe import Recipe
from distca.data.texts import Texts
from distca.errors import DataError, system_words
from distca.json_file import read_object


@dataclass(frozen=True)
class CachedTokens:
    """A text's tokens in a cache.

    Attributes:
        cache: the folder of all.
        texts: the documents.
        recipe: how they become ids.
        bad: what happens to documents that cannot be read or tokenized.
    """

    cache: Path
    texts: Texts
    recipe: Recipe
    bad: Bad = "error"

    def find(self) -> str | None:
        """Returns the prefix of the indexed source that holds the tokens; None where none is known to be there."""
        try:
            named = read_object(self._by_files())
            prefix = self._prefix(named["content"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return prefix if Path(f"{prefix}.idx").is_file() else None

    def make(self, processes: int, advanced: Callable[[int], None] = lambda _: None) -> str:
        """Returns the prefix of the indexed source that holds the tokens. They are made unless they are found by their
        content.

        Args:
            processes: that tokenize.
            advanced: as of ``convert``.

        Raises:
            DataError, VersionError: as of ``convert``.
        """
        if (found := self.find()) is not None:
            return found
        content = _digest([self.texts.digest(), self._identity()])
        prefix, named = self._prefix(content), self._by_files()
        if not Path(f"{prefix}.idx").is_file():
            convert(
                *(self.texts, self.recipe, prefix),
                processes=processes,
                bad=self.bad,
                advanced=advanced,
                elsewhere="set `cache`",
            )
        try:
            named.parent.mkdir(exist_ok=True)
            fresh = named.with_suffix(".new")
            fresh.write_text(json.dumps({"content": content}), encoding="utf-8")
            fresh.replace(named)
        except OSError as error:
            said = f"{named} cannot be written ({system_words(error)})"
            raise DataError(f"{said}; set `cache` or make room for it.") from None
        return prefix

    def look(self) -> int:
        """Try the tokenizer and the first documents; the vocabulary.

        Raises:
            DataError, VersionError: what would fail at once.
        """
        encoder = self.recipe.open()
        for block in self.texts.blocks(self.recipe.field, self.recipe.beside):
            encode_block(block.first_documents(), encoder, self.recipe, self.bad)
            break
        return encoder.vocabulary

    def _prefix(self, content: str) -> str:
        return str(self.cache / content / "tokens")

    def _by_files(self) -> Path:
        return self.cache / "by_files" / f"{_digest([self.texts.kind, self.texts.state(), self._identity()])}.json"

    def _identity(self) -> dict[str, Any]:
        """Returns all that ids depend on beside the texts. Tokens made without bad documents have an entry of their
        own."""
        return self.recipe.identity() | ({"bad": self.bad} if self.bad == "skip" else {})


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]
