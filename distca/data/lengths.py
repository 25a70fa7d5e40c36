"""How long the documents of any source are, before anything is tokenized: a byte of text is a token.

Array legend: D documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from distca.data.blend import Blend, read_blend
from distca.data.encoding import encode_block
from distca.data.recipe import Recipe
from distca.data.sources import DocumentSource, open_source
from distca.data.sources.source import BYTE_VOCABULARY
from distca.data.texts import Texts, open_texts
from distca.data.tokenizer import find_tokenizer
from distca.errors import DataError

LengthKind = Literal["text", "jsonl", "parquet", "arrow", "blend", "indexed", "stdlib", "mix"]
DATA_KINDS = tuple(kind for kind in get_args(LengthKind) if kind not in ("stdlib", "mix"))
"""Those that a path names."""
_ANY_VOCABULARY = 1 << 31
"""More ids than a file can have: none is read."""


@dataclass(frozen=True)
class KnownLengths:
    """Documents of which nothing but the lengths is known.

    Attributes:
        lengths: [D] int64 bytes.
        vocabulary: of bytes.
    """

    lengths: np.ndarray
    vocabulary: int = BYTE_VOCABULARY

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        raise AssertionError("only lengths are known")

    def where(self, document: int) -> str:
        return f"document {document}"


def open_lengths(kind: str, path: str | None, *, field: str | None = None, seed: int = 0) -> DocumentSource:
    """A source whose lengths are meant, not its tokens. Tables and packed files are read whole for it.

    Args:
        kind: one of LengthKind.
        path: as the kind has it; of a blend its YAML file.
        field: of each JSON object, or column of each table, that holds the document; None for text.
        seed: of a mix.

    Raises:
        DataError: it cannot be opened or read, or has no document.
        VersionError: a package that it needs is missing.
    """
    if kind == "blend":
        parts = read_blend(path or "")
        sources = [open_lengths(each.source, each.path, field=each.field or field) for each in parts]
        return Blend(sources, parts)
    if kind in ("jsonl", "parquet", "arrow"):
        texts = open_texts(kind, path)
        if kind != "jsonl" or texts.packed:
            return _read(texts, field or "text")
    vocabulary = _ANY_VOCABULARY if kind == "indexed" else None
    return open_source(kind, path, vocabulary=vocabulary, seed=seed, field=field or "text")


def _read(texts: Texts, field: str) -> KnownLengths:
    recipe = Recipe(find_tokenizer("bytes"), field)
    encoder = recipe.open()
    found = [np.frombuffer(encode_block(block, encoder, recipe).lengths, np.int32) for block in texts.blocks(field)]
    lengths = np.concatenate([*found, np.zeros(0, np.int32)]).astype(np.int64)
    if not len(lengths):
        where = texts.files[0] if len(texts.files) == 1 else texts.files[0].parent
        raise DataError(f"{where} holds no document with text in {field!r}; change `path` or `field`.")
    return KnownLengths(lengths)
