"""Tokenizers: text to token ids, for the tokenizing of a corpus."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from distca.data.sources.source import BYTE_VOCABULARY
from distca.errors import DataError, VersionError, system_words
from distca.json_file import open_regular, read_object

_BATCH_BYTES = 1 << 15
"""Bytes of text that are encoded at a time. More of them fall out of the caches, which takes longer."""
_MOST_IDS = 1 << 24
"""A vocabulary has at most so many ids, each with a row of the embedding; the largest ones known have 2^18."""


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
    """A tokenizer.json of the library ``tokenizers``. A control token that stands in a text is encoded as text.

    Attributes:
        vocabulary: token ids are in [0, vocabulary).
        begin: the token that every document begins with; None for none.
        end: the token that every document ends with; None for none.
    """

    def __init__(self, tokenizer: Any, begin: str | None = None, end: str | None = None) -> None:
        """Wrap a ``tokenizers.Tokenizer``.

        Raises:
            DataError: it has no token ``begin`` or ``end``.
        """
        ids = tokenizer.get_vocab(with_added_tokens=True)
        for name, token in (("begin", begin), ("end", end)):
            if token is not None and token not in ids:
                raise DataError(
                    f"The tokenizer has no token {token!r} to {name} documents with; choose another `{name}_token`."
                )
        self.vocabulary, self.begin, self.end = max(ids.values()) + 1, begin, end
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True
        self._begin, self._end = ([] if token is None else [ids[token]] for token in (begin, end))
        self._batch = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        return [self._closed(ids) for batch in _batches(documents) for ids in self._ids(batch)]

    def _ids(self, documents: list[bytes]) -> Iterator[list[int]]:
        texts = [document.decode("utf-8") for document in documents]
        try:
            encodings = self._batch(texts, add_special_tokens=False)
        except BaseException as error:  # The library raises bare Exception for a text that it cannot encode, or worse.
            if not is_of_library(error):
                raise
            raise ValueError(str(error)) from None
        return (encoding.ids for encoding in encodings)

    def _closed(self, ids: list[int]) -> np.ndarray:
        """Returns the ids with the tokens around them; a border that has no token is left out."""
        ids = [*self._begin, *ids, *self._end] if ids else ids
        return np.fromiter(ids, np.int64, len(ids))  # twice as fast as np.array


def _batches(documents: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Documents that are encoded at a time."""
    batch: list[bytes] = []
    held = 0
    for document in documents:
        batch.append(document)
        held += len(document)
        if held >= _BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer, and the tokens with which documents begin and end.

    Attributes:
        name: ``bytes``, or the tokenizer.json.
        begin: the token that documents begin with; None for none.
        end: the token that documents end with; None for none.
    """

    name: str
    begin: str | None = None
    end: str | None = None

    def digest(self) -> str:
        """The digest of the content, wherever it lies."""
        content = b"bytes" if self.name == "bytes" else _content(Path(self.name))
        return hashlib.sha256(content).hexdigest()

    def closing(self) -> str:
        """A sentence on the tokens around texts."""
        begin, end = (repr(token) if token else "no token" for token in (self.begin, self.end))
        return f"Texts begin with {begin} and end with {end} of the tokenizer {self.name}."

    def open(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            DataError: it cannot be read, or has no such tokens.
            VersionError: the library ``tokenizers`` is missing.
        """
        return (
            ByteTokenizer() if self.name == "bytes" else JsonTokenizer(load_json(Path(self.name)), self.begin, self.end)
        )


def find_tokenizer(name: str, begin_token: str | None = None, end_token: str | None = None) -> TokenizerFiles:
    """The tokenizer ``bytes``, or the one in a tokenizer.json file, or in a model's folder that holds one.

    Args:
        name: ``bytes``, the file or the folder.
        begin_token: put before every document; None takes what :func:`read_settings` of the folder says: its bos_token,
            if the tokenizer puts it before texts by itself. An empty one puts none.
        end_token: put behind every document; None takes the folder's eos_token. An empty one puts none.

    Raises:
        DataError: there is no such file, or it cannot be read.
    """
    if name == "bytes":
        for setting, token in (("begin_token", begin_token), ("end_token", end_token)):
            if token:
                raise DataError(
                    f"The tokenizer 'bytes' has no special tokens; leave `{setting}` unset instead of {token!r}."
                )
        return TokenizerFiles(name)
    folder = Path(name)
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    if not file.is_file():
        raise DataError(
            f"The tokenizer {name!r} is neither 'bytes' nor a tokenizer.json file or a folder that holds one; set "
            "`tokenizer` to one, or save it there with the tokenizer's save_pretrained."
        )
    said = read_settings(folder) if folder.is_dir() else {}
    begin, end = token_text(said.get("bos_token")), token_text(said.get("eos_token"))
    if not said.get("add_bos_token", puts_first(file, begin)):
        begin = None
    begin, end = (own if given is None else given or None for own, given in ((begin, begin_token), (end, end_token)))
    return TokenizerFiles(str(file), begin, end)


def load_json(file: Path) -> Any:
    """A tokenizer.json as a ``tokenizers.Tokenizer``.

    Raises:
        DataError: it cannot be read.
        VersionError: the library ``tokenizers`` is missing.
    """
    try:
        from tokenizers import Tokenizer as Loaded
    except ImportError:
        raise VersionError(f"Tokenizing with {file} needs the package tokenizers: pip install tokenizers.") from None
    try:
        read_object(file)
        loaded = Loaded.from_file(str(file))
    except BaseException as error:  # The library raises bare Exception for a file it cannot use, or worse.
        if not is_of_library(error):
            raise
        raise DataError(f"{file} is not a tokenizer.json that the package tokenizers can read: {error}.") from None
    _check_ids(file, loaded.get_vocab(with_added_tokens=True))
    # Many files carry the lengths of a model's batches; a corpus keeps every token and gets none to fill up.
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def is_of_library(error: BaseException) -> bool:
    """Whether the library ``tokenizers`` raised it: what fails inside of it is no Exception, but a panic of Rust."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _check_ids(file: Path, ids: dict[str, int]) -> None:
    if not ids or max(ids.values()) >= _MOST_IDS:
        wrong = f"a token has the id {max(ids.values()):,}; the largest may be {_MOST_IDS - 1:,}" if ids else "no token"
        raise DataError(f"{file} is not a tokenizer.json that ids can be made with: it has {wrong}.")


def read_beside(file: Path) -> dict[str, Any]:
    """A JSON object beside a tokenizer; an empty one where there is no such file.

    Raises:
        DataError: the file is no JSON object.
    """
    if not os.path.lexists(file):
        return {}
    try:
        return read_object(file)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({system_words(error)}); copy it again.") from None
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON ({error}); copy it again.") from None


def read_text(file: Path) -> str:
    """A text beside a tokenizer.

    Raises:
        DataError: it is no regular file of UTF-8.
    """
    try:
        return _content(file).decode("utf-8")
    except OSError as error:
        raise DataError(f"{file} cannot be read ({system_words(error)}); copy it again.") from None
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8 text; copy it again.") from None


def _content(file: Path) -> bytes:
    with open_regular(file) as opened:
        return opened.read()


def read_settings(folder: Path) -> dict[str, Any]:
    """Returns the settings in a folder's tokenizer_config.json. Tokens that it does not name come from
    special_tokens_map.json.

    Raises:
        DataError: one of them is not JSON.
    """
    said = read_beside(folder / "tokenizer_config.json")
    named = {name: value for name, value in said.items() if value is not None}
    return read_beside(folder / "special_tokens_map.json") | named


def token_text(said: Any) -> str | None:
    """A token as these files have it: its text, or an object with it."""
    content = said.get("content") if isinstance(said, dict) else said
    return content if isinstance(content, str) and content else None


def puts_first(file: Path, begin: str | None) -> bool:
    """Whether the tokenizer's own template has the token before a text."""
    if begin is None:
        return False
    try:
        template = read_object(file).get("post_processor") or {}
        steps = [template, *template.get("processors", [])]
        return any((step.get("single") or [{}])[0].get("SpecialToken", {}).get("id") == begin for step in steps)
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return False  # which is said where the file is opened
