"""Document lengths as commands take them: a file with one per line, a mix, or training data. No torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from distca.data.corpus import Corpus
from distca.data.lengths import DATA_KINDS, open_lengths
from distca.data.mixes import MIX_NAMES, sample_mix
from distca.errors import DataError, PlanError, system_words
from distca.words import rename_parameters

_GIVEN_BY = {"path": "PATH", "source": "KIND"}
_NOT_GIVEN = {
    "field": "field, as the sources of a blend:PATH can",
    "bad": "--bad of distca data convert",
    "conversations": "--conversations of distca plan",
}
"""Parameters for which a command has no option."""
MOST_TOKENS = 1 << 32
"""Tokens of the largest micro-batch that is planned: a million for each of 4096 ranks."""


def read_data(lengths: str, *, longest: int, seed: int = 0, **how: Any) -> np.ndarray | None:
    """[D] int64 document lengths of training data that is given as KIND:PATH; of a blend those of an epoch. None where
    ``lengths`` is something else.

    Args:
        lengths: as they are given.
        longest: texts are cut where they exceed it; conversations that do are left out.
        seed: of the documents that a blend uses once more than others.
        how: the data is read: ``field``, ``tokenizer``, ``conversations`` and ``bad`` of ``open_lengths``.

    Raises:
        DataError: it cannot be read; named by how it is given here.
        VersionError: a package that it needs is missing.
    """
    kind, _, path = lengths.partition(":")
    if kind not in DATA_KINDS or not path:
        return None
    try:
        return Corpus(open_lengths(kind, path, **how), longest, None, seed=seed).train.lengths
    except DataError as error:
        names = _GIVEN_BY | {name: words for name, words in _NOT_GIVEN.items() if name not in how}
        raise DataError(rename_parameters(str(error), names.get)) from None


def read_lengths(lengths: str, *, tokens: int, seed: int) -> np.ndarray:
    """[D] int64 document lengths from a mix (``tokens`` of it) or a file with one length per line.

    Raises:
        PlanError: ``lengths`` is neither a mix nor a file of text; it has no line, or one that is no positive whole
            number; or they add up to more than MOST_TOKENS.
    """
    if lengths in MIX_NAMES:
        return sample_mix(lengths, tokens, seed)
    path = Path(lengths)
    if not os.path.isfile(lengths):  # Path.is_file raises OSError on lengths typed here, too many for a name
        raise PlanError(
            f"lengths is {lengths!r}: neither a file nor one of the mixes {', '.join(MIX_NAMES)}, nor training data as "
            f"KIND:PATH, where KIND is one of {', '.join(DATA_KINDS)}."
        )
    found = [_length(line, number, lengths) for number, line in enumerate(_lines(path), 1) if line.strip()]
    if not found:
        raise PlanError(f"{lengths} holds no document length; write one per line.")
    if sum(found) > MOST_TOKENS:
        raise PlanError(
            f"The lengths in {lengths} add up to {sum(found):,} tokens; a micro-batch has at most {MOST_TOKENS:,}, so "
            "leave some out."
        )
    return np.array(found, np.int64)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise PlanError(f"{path} is not UTF-8 text; give a file of text with one document length per line.") from None
    except OSError as error:
        raise PlanError(
            f"{path} cannot be read ({system_words(error)}); make it readable or give another file."
        ) from None


def _length(line: str, number: int, lengths: str) -> int:
    text = line.strip()
    # int() itself refuses thousands of digits, which are too many anyway.
    fits = text.isdecimal() and len(text) <= 20 and 1 <= int(text) <= MOST_TOKENS
    if not fits:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        kind = next((kind for kind in DATA_KINDS if f".{kind}" in Path(lengths).suffixes), None)
        hint = f" Training data are given as {kind}:{lengths}." if kind else ""
        raise PlanError(
            f"Line {number} of {lengths} is {shown!r}; a line holds one length from 1 to {MOST_TOKENS}.{hint}"
        )
    return int(text)
