"""One door to all document sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from distca.data.mixes import MIX_NAMES
from distca.data.sources.source import DocumentSource, readable
from distca.errors import DataError

SourceKind = Literal["stdlib", "text", "jsonl", "indexed", "mix"]
"""Sources whose tokens are there without tokenizing; other text is tokenized first."""
KINDS: tuple[str, ...] = get_args(SourceKind)
MIX_TOKENS = 1 << 26


@readable()
def open_source(
    kind: str,
    path: str | None = None,
    tokenizer: str = "bytes",
    *,
    vocabulary: int | None = None,
    seed: int = 0,
    mix_tokens: int = MIX_TOKENS,
    max_length: int | None = None,
    field: str = "text",
) -> DocumentSource:
    """Open a source of documents.

    Args:
        kind: ``stdlib``: the running Python's own source files; ``text``: a folder of text files; ``jsonl``: a file or
            folder of JSON lines with a "text" field; ``indexed``: a Megatron .bin/.idx pair; ``mix``: synthetic
            documents whose lengths follow a named mix.
        path: the folder, file, prefix or mix name; ``stdlib`` takes none.
        tokenizer: ``bytes``. Text goes through another tokenizer once, in ``distca data convert``; ``indexed`` and
            ``mix`` hold token ids already and do not look at this.
        vocabulary: number of token ids, for ``mix`` (else 256) and for ``indexed`` files that have no sidecar; None or
            0 where it is known otherwise.
        seed: for ``mix`` only.
        mix_tokens: tokens in all, for ``mix`` only.
        max_length: longest document, for ``mix`` only.
        field: of a line's object that is its document, for ``jsonl`` only.

    Raises:
        DataError: if the source cannot be opened; the message says what to change.
    """
    if kind not in KINDS:
        raise DataError(f"There is no document source {kind!r}; `source` is one of {', '.join(KINDS)}.")
    vocabulary = vocabulary or None
    if vocabulary is not None and vocabulary < 0:
        raise DataError(f"`vocabulary` is the number of token ids, at least 1, not {vocabulary}.")
    if kind in ("stdlib", "text", "jsonl"):
        _check_bytes(kind, path, tokenizer, vocabulary)
    if kind == "stdlib":
        from distca.data.sources.text import open_stdlib

        return open_stdlib(path)
    if not path:
        mixes = f" to one of {', '.join(MIX_NAMES)}" if kind == "mix" else ""
        raise DataError(f"The document source {kind!r} needs a path; set `path`{mixes}.")
    if kind == "text":
        from distca.data.sources.text import open_text_folder

        return open_text_folder(path)
    if kind == "jsonl":
        from distca.data.sources.json_lines import JsonLines

        return JsonLines(path, field)
    if kind == "indexed":
        from distca.data.sources.indexed import Indexed

        return Indexed(path, vocabulary)
    from distca.data.sources.mix import Mix

    return Mix(path, mix_tokens, seed, vocabulary=vocabulary, max_length=max_length)


def passed_over(kind: str, **given: object) -> Iterator[str]:
    """Options of documents that a source would pass over, a sentence each: what is read would be other than asked for.

    Args:
        kind: as in :func:`open_source`, or any other that has fields.
        given: options such as ``field``, ``conversations`` and ``end_token``; what is false was not given.
    """
    ids, files = kind in ("indexed", "mix"), kind in ("stdlib", "text")
    why = "whose documents are token ids already" if ids else "whose documents are whole files"
    for name, value in given.items():
        if value and (ids or (files and name in ("field", "conversations"))):
            shown = "true" if value is True else value
            yield f"`{name}` is {shown}, but `source` is {kind}, {why}; leave it out."


def _check_bytes(kind: str, path: str | None, tokenizer: str, vocabulary: int | None) -> None:
    if tokenizer != "bytes":
        place = f" --path {path}" if path else ""
        raise DataError(
            f"The document source {kind!r} reads bytes as tokens, but `tokenizer` is {tokenizer!r}; tokenize once "
            f"with `distca data convert --source {kind}{place} --tokenizer {tokenizer} --output PREFIX`, then set "
            "`source` to indexed and `path` to PREFIX."
        )
    if vocabulary not in (None, 256):
        raise DataError(
            f"The document source {kind!r} reads bytes, so its vocabulary is 256, but `vocabulary` is {vocabulary}; "
            "leave `vocabulary` unset."
        )
