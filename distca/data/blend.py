"""Blends: several sources, and how often their documents are used in an epoch.

A blend is a YAML file with one entry a source::

    - {source: jsonl, path: books.jsonl.gz, weight: 3}
    - {source: parquet, path: web, field: content, weight: 7, long: {tokens: 65536, share: 0.6}}

Weights are shares of the tokens. An epoch of the blend is as short as it can be with at least as many tokens of
each source as it has. In place of ``weight``, ``epochs`` says how often a source is used in an epoch of the blend, and
``tokens`` for how many tokens. ``long`` gives documents of at least so many tokens that share of the source's tokens.

Array legend: D documents of all sources together. All arrays are int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distca.data.left_out import LeftOut
from distca.data.sampler import shuffled
from distca.data.sources.source import DocumentSource
from distca.errors import DataError, system_words

_KINDS = ("text", "jsonl", "parquet", "arrow", "indexed", "stdlib")
_WITH_FIELDS = ("jsonl", "parquet", "arrow")
_AMOUNTS = ("weight", "epochs", "tokens")
_MOST_USES = 1 << 31
"""A document of a source is used at most so often in an epoch."""


@dataclass(frozen=True)
class Ingredient:
    """One source of a blend.

    Attributes:
        source: its kind, as ``open_source`` or ``open_texts`` takes it.
        path: where it is; None for ``stdlib``.
        field: that holds the document; None for the usual one.
        amount: by which of weight, epochs and tokens it is used.
        value: of that.
        long_tokens: what counts as long; 0 where long documents are as others.
        long_share: share of the source's tokens that long documents get.
    """

    source: str
    path: str | None
    field: str | None
    amount: str
    value: float
    long_tokens: int = 0
    long_share: float = 0.0


def read_blend(path: str) -> list[Ingredient]:
    """The sources of a blend; relative paths begin at the file's folder.

    Raises:
        DataError: it cannot be read, or says what no blend can be.
    """
    from distca.yaml_file import read_yaml

    try:
        entries = read_yaml(Path(path), DataError)
    except OSError as error:
        raise DataError(
            f"The blend `path` {path!r} cannot be read ({system_words(error)}); give another file."
        ) from None
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{path} must hold a list of sources, such as '- {{source: jsonl, path: a.jsonl, weight: 1}}'.")
    blend = [_ingredient(f"{path}, source {number}", each, Path(path).parent) for number, each in enumerate(entries, 1)]
    if len({each.amount == "weight" for each in blend}) > 1:
        raise DataError(
            f"{path} gives weights to some sources and epochs or tokens to others; give weights to all or to none."
        )
    return blend


def _ingredient(where: str, entry: Any, folder: Path) -> Ingredient:
    known = ("source", "path", "field", "long", *_AMOUNTS)
    if not isinstance(entry, dict):
        raise DataError(f"{where} must be a mapping with some of {', '.join(known)}, not {entry!r}.")
    if unknown := [name for name in entry if name not in known]:
        raise DataError(f"{where} has {unknown[0]!r}; it can have {', '.join(known)}.")
    source, path, amounts = entry.get("source"), entry.get("path"), [name for name in _AMOUNTS if name in entry]
    if source not in _KINDS:
        raise DataError(f"{where} has source {source!r}; it is one of {', '.join(_KINDS)}.")
    if len(amounts) != 1:
        raise DataError(f"{where} needs one of {', '.join(_AMOUNTS)}, and has {', '.join(amounts) or 'none'}.")
    value = _number(where, amounts[0], entry[amounts[0]])
    long = entry.get("long") or {}
    if not isinstance(long, dict) or set(long) not in (set(), {"tokens", "share"}):
        raise DataError(f"{where} has long {long!r}; write it as {{tokens: 65536, share: 0.6}}.")
    share = _number(where, "long.share", long["share"]) if long else 0.0
    if share > 1:
        raise DataError(f"{where} has long.share {share}; it is a share of the source's tokens, at most 1.")
    tokens = int(_number(where, "long.tokens", long["tokens"])) if long else 0
    if (path is None) != (source == "stdlib"):
        needs = "takes no path" if path is not None else "needs a path"
        raise DataError(f"{where} has path {path!r}, but source {source} {needs}; correct it.")
    field = entry.get("field")
    if field is not None and (not isinstance(field, str) or not field or source not in _WITH_FIELDS):
        raise DataError(f"{where} has field {field!r}; it is a text, for source {', '.join(_WITH_FIELDS)} alone.")
    place = None if path is None else str(folder / str(path))
    return Ingredient(source, place, field, amounts[0], value, tokens, share)


def _number(where: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise DataError(f"{where} has {name} {value!r}; it must be a number above 0.")
    return float(value)


class Blend:
    """Several sources as one.

    Attributes:
        lengths: [D] tokens per document, source after source.
        vocabulary: token ids are in [0, vocabulary).
    """

    def __init__(self, sources: Sequence[DocumentSource], ingredients: Sequence[Ingredient]) -> None:
        """Take sources and, of each, how often it is used."""
        self._sources, self._ingredients = sources, ingredients
        self._first = np.cumsum([0, *(len(source.lengths) for source in sources)], dtype=np.int64)
        self.lengths = np.concatenate([source.lengths for source in sources])
        self.vocabulary = max(source.vocabulary for source in sources)

    @property
    def masked(self) -> bool:
        """Whether some tokens are not to be learned."""
        return any(getattr(source, "masked", False) for source in self._sources)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64 tokens of one document."""
        source, own = self._own(document)
        return source.read(own, start, stop)

    @property
    def masked_documents(self) -> np.ndarray:
        """[D] bool: which documents are of sources of which some tokens are not to be learned."""
        masked = [bool(getattr(source, "masked", False)) for source in self._sources]
        return np.repeat(masked, [len(source.lengths) for source in self._sources])

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Documents that its sources left out."""
        return tuple(each for source in self._sources for each in getattr(source, "left_out", ()))

    def learned(self, document: int, start: int, stop: int) -> np.ndarray:
        """[stop - start] bool, which tokens of a document are to be learned."""
        source, own = self._own(document)
        learned = getattr(source, "learned", None)
        return np.ones(stop - start, bool) if learned is None else learned(own, start, stop)

    def where(self, document: int) -> str:
        """Returns where the document's source says that it is."""
        source, own = self._own(document)
        return source.where(own)

    def epoch(self, documents: np.ndarray, seed: int, tokens: np.ndarray | None = None) -> np.ndarray:
        """The documents of one epoch, each as often as it is used.

        Args:
            documents: [·] those that may be used, ascending.
            seed: of which documents are used once more than others.
            tokens: [·] tokens of each that are used, where some are left out; None for all.

        Raises:
            DataError: a source has no document that could be used, or no long or no short one where it needs some; or
                the epoch would have none of a source, or more than can be counted.
        """
        tokens = self.lengths[documents] if tokens is None else tokens
        owner = np.searchsorted(self._first, documents, side="right") - 1
        own = [owner == number for number in range(len(self._sources))]
        budgets = self._budgets([int(tokens[each].sum()) for each in own])
        used = []
        for number, (is_own, budget, each) in enumerate(zip(own, budgets, self._ingredients, strict=True)):
            mine, lengths = documents[is_own], tokens[is_own]
            long = self.lengths[mine] >= each.long_tokens if each.long_tokens else np.zeros(len(mine), bool)
            share = each.long_share if each.long_tokens else 0.0
            for kind, wanted in ((True, share * budget), (False, (1 - share) * budget)):
                chosen = long == kind
                used.append(self._use(mine[chosen], lengths[chosen], wanted, each, (seed, number, int(kind))))
        return np.concatenate(used)

    def _budgets(self, tokens: list[int]) -> list[float]:
        """Tokens of each source in an epoch of the blend."""
        for each, there in zip(self._ingredients, tokens, strict=True):
            if not there:
                raise DataError(f"The blend's source {each.path} has no document left for training; take it out.")
        if self._ingredients[0].amount == "weight":
            whole = max(there / each.value for each, there in zip(self._ingredients, tokens, strict=True))
            return [whole * each.value for each in self._ingredients]
        return [
            each.value * (there if each.amount == "epochs" else 1)
            for each, there in zip(self._ingredients, tokens, strict=True)
        ]

    def _use(
        self, documents: np.ndarray, lengths: np.ndarray, tokens: float, each: Ingredient, entropy: tuple[int, ...]
    ) -> np.ndarray:
        """Documents of so many tokens each, repeated to ``tokens``: all equally often, and some of them once more."""
        there = int(lengths.sum())
        if tokens and not there:
            raise DataError(
                f"The blend's source {each.path} has no documents on both sides of {each.long_tokens:,} tokens, where "
                "its long divides them; change it."
            )
        if not there:
            return documents
        whole, rest = divmod(tokens, there)
        if whole * len(documents) > _MOST_USES:
            raise DataError(
                f"An epoch of the blend would use each document of its source {each.path} {whole:,.0f} times; change "
                f"its {each.amount}, {each.value:g}, or that of the others."
            )
        order = shuffled(len(documents), *entropy)
        more = order[np.cumsum(lengths[order]) - lengths[order] / 2 < rest]
        times = np.full(len(documents), int(whole), np.int64)
        times[more] += 1
        if tokens and not lengths[times > 0].any():
            side = f" on one side of {each.long_tokens:,} tokens" if each.long_tokens else ""
            raise DataError(
                f"An epoch of the blend would have no document of its source {each.path}{side}, as it takes less than "
                f"half of the first one; raise its {each.amount}, {each.value:g}{', or change its long' * bool(side)}."
            )
        return np.repeat(documents, times)

    def _own(self, document: int) -> tuple[DocumentSource, int]:
        number = int(np.searchsorted(self._first, document, side="right")) - 1
        return self._sources[number], document - int(self._first[number])
