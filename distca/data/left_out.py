"""Documents that are not trained on, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from distca.words import count

MOST_NAMED = 5
"""Documents that are named each; more are counted only."""
BAD, EMPTY = "that cannot be read or tokenized", "without a token to learn"
"""Reasons of documents that tokenizing leaves out."""


@dataclass(frozen=True)
class LeftOut:
    """Documents that were left out for one reason.

    Attributes:
        documents: how many.
        reason: what is said of them behind their number.
        named: the first of them, each with what is wrong with it; at most MOST_NAMED.
        noun: what they are.
    """

    documents: int
    reason: str
    named: tuple[str, ...] = ()
    noun: str = "document"

    def __str__(self) -> str:
        said = f"{count(self.documents, self.noun)} {self.reason}"
        if not self.named:
            return said
        more = ", the first of them" if self.documents > len(self.named) else ""
        return f"{said}{more}: {'; '.join(self.named)}"


def together(left_out: Iterable[LeftOut]) -> tuple[LeftOut, ...]:
    """The same with one entry for each reason."""
    found: dict[tuple[str, str], LeftOut] = {}
    for each in left_out:
        before = found.get((each.reason, each.noun), LeftOut(0, each.reason, (), each.noun))
        named = (*before.named, *each.named)[:MOST_NAMED]
        found[each.reason, each.noun] = LeftOut(before.documents + each.documents, each.reason, named, each.noun)
    return tuple(each for each in found.values() if each.documents)
