"""Tokenizers: text to token ids, for the conversion of a corpus."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from distca.data.sources.source import BYTE_VOCABULARY
from distca.errors import DataError


class Tokenizer(Protocol):
    """Token ids in [0, vocabulary) for documents given as UTF-8 bytes."""

    @property
    def vocabulary(self) -> int: ...

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """The int64 ids of each document; ValueError if one of them cannot be encoded."""
        ...


class ByteTokenizer:
    """Every byte is a token."""

    vocabulary = BYTE_VOCABULARY

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(document, dtype=np.uint8).astype(np.int64) for document in documents]


class JsonTokenizer:
    """A tokenizer.json of the library ``tokenizers``. Its own template of special tokens (BOS, EOS) is not applied."""

    def __init__(self, tokenizer: Any, end: str | None) -> None:
        """Wrap a ``tokenizers.Tokenizer``; ``end`` is a token to append to every document."""
        ids = tokenizer.get_vocab(with_added_tokens=True)
        if end is not None and end not in ids:
            raise DataError(f"The tokenizer has no token {end!r} to end documents with; choose another end_token.")
        self.vocabulary = max(ids.values()) + 1
        self._tokenizer = tokenizer
        self._end = [] if end is None else [ids[end]]

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        texts = [document.decode("utf-8") for document in documents]
        try:
            encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        except Exception as error:  # The library raises bare Exception for a text that its model cannot encode.
            raise ValueError(str(error)) from None
        return [np.array([*encoding.ids, *self._end], dtype=np.int64) for encoding in encodings]


def open_tokenizer(name: str, end_token: str | None = None) -> Tokenizer:
    """The tokenizer ``bytes``, or the one in a tokenizer.json file (or in a folder that holds one).

    Raises:
        DataError: if there is no such file, it cannot be read, or the library ``tokenizers`` is missing.
    """
    if name == "bytes":
        if end_token is not None:
            raise DataError(
                f"The tokenizer 'bytes' has no special tokens; leave end_token unset instead of {end_token!r}."
            )
        return ByteTokenizer()
    file = Path(name, "tokenizer.json") if Path(name).is_dir() else Path(name)
    if not file.is_file():
        raise DataError(
            f"The tokenizer {name!r} is neither 'bytes' nor a tokenizer.json file or a folder that holds one."
        )
    try:
        from tokenizers import Tokenizer as Loaded
    except ImportError:
        raise DataError(f"Tokenizing with {file} needs the package tokenizers: pip install tokenizers.") from None
    try:
        json.loads(file.read_bytes())
        loaded = Loaded.from_file(str(file))
    except Exception as error:  # The library raises bare Exception for a file it cannot use.
        raise DataError(f"{file} is not a tokenizer.json that the package tokenizers can read: {error}.") from None
    # Many files carry the lengths of a model's batches; a corpus keeps every token and gets none to fill up.
    loaded.no_truncation()
    loaded.no_padding()
    return JsonTokenizer(loaded, end_token)
