"""How long the documents of any source are, as texts, of which a byte is a token, or as a tokenizer makes them.

Array legend: D documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from distca.data.blend import Blend, read_blend
from distca.data.encoding import Bad, encoded_blocks, processes_for
from distca.data.find_recipe import find_recipe
from distca.data.left_out import BAD, EMPTY, LeftOut, together
from distca.data.recipe import Recipe
from distca.data.sources import DocumentSource, open_source
from distca.data.texts import TEXT_KINDS, Texts, open_texts
from distca.errors import DataError

LengthKind = Literal["text", "jsonl", "parquet", "arrow", "blend", "indexed", "stdlib", "mix"]
DATA_KINDS = tuple(kind for kind in get_args(LengthKind) if kind not in ("stdlib", "mix"))
"""The kinds whose documents a path names."""
_ANY_VOCABULARY = 1 << 31
"""More ids than a file can have: none is read."""


@dataclass(frozen=True)
class KnownLengths:
    """Documents of which nothing but the lengths is known.

    Attributes:
        lengths: [D] int64 tokens.
        vocabulary: token ids are in [0, vocabulary).
        masked: whether some tokens are not to be learned.
        learned_tokens: tokens that are to be learned, of all documents together.
        left_out: documents that gave no token, or were refused.
    """

    lengths: np.ndarray
    vocabulary: int
    masked: bool
    learned_tokens: int
    left_out: tuple[LeftOut, ...] = ()

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        raise AssertionError("only lengths are known")

    def where(self, document: int) -> str:
        return f"document {document}"


def open_lengths(
    kind: str,
    path: str | None,
    *,
    field: str | None = None,
    seed: int = 0,
    tokenizer: str = "bytes",
    conversations: bool = False,
    bad: Bad = "error",
) -> DocumentSource:
    """A source whose lengths are meant, not its tokens. Tables, packed files and what is tokenized are read whole.

    Args:
        kind: one of LengthKind.
        path: as the kind has it; of a blend its YAML file.
        field: of each JSON object, or column of each table, that holds the document; None for text, or messages.
        seed: of a mix.
        tokenizer: of texts: bytes, a tokenizer.json or a folder that holds one.
        conversations: documents of texts go through the folder's chat template.
        bad: what happens to documents that cannot be read or tokenized.

    Raises:
        DataError: it cannot be opened or read, or has no document.
        VersionError: a package that it needs is missing.
    """
    if kind == "blend":
        parts = read_blend(path or "")
        how: dict[str, Any] = {"tokenizer": tokenizer, "conversations": conversations, "bad": bad}
        texts_only = [how if each.source in TEXT_KINDS else {} for each in parts]
        opened = zip(parts, texts_only, strict=True)
        return Blend(
            [open_lengths(each.source, each.path, field=each.field or field, **own) for each, own in opened], parts
        )
    if kind in TEXT_KINDS:
        texts = open_texts(kind, path)
        tried = bad == "skip" and kind == "jsonl"
        if kind in ("parquet", "arrow") or texts.packed or conversations or tried or tokenizer != "bytes":
            return _read(texts, find_recipe(tokenizer, field, conversations=conversations), bad)
    vocabulary = _ANY_VOCABULARY if kind == "indexed" else None
    return open_source(kind, path, vocabulary=vocabulary, seed=seed, field=field or "text")


def _read(texts: Texts, recipe: Recipe, bad: Bad) -> KnownLengths:
    encoder, lengths, left_out = recipe.open(), [np.zeros(0, np.int32)], []
    masked, learned = False, 0
    blocks = texts.blocks(recipe.field, recipe.beside)
    for _, tokens in encoded_blocks(blocks, recipe, encoder, processes_for(texts.bytes), bad):
        lengths.append(np.frombuffer(tokens.lengths, np.int32))
        masked = masked or bool(tokens.mask)
        learned += int(np.frombuffer(tokens.mask, np.uint8).sum()) if tokens.mask else int(lengths[-1].sum())
        left_out += [LeftOut(tokens.bad, BAD, tokens.named), LeftOut(tokens.empty, EMPTY)]
    known = np.concatenate(lengths).astype(np.int64)
    if not len(known):
        where = texts.files[0] if len(texts.files) == 1 else texts.files[0].parent
        found = "; ".join(map(str, together(left_out)))
        raise DataError(
            f"{where} holds no document with text in {recipe.field!r}; change `path` or `field`."
            + (f" Left out: {found}." if found else "")
        )
    return KnownLengths(known, encoder.vocabulary, masked, learned, together(left_out))
