"""Sentences of the pages have one idea: none has more than LONGEST words. Tables, lists, code and quotes are exempt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, name_of

LONGEST = 25
PROSE = [page for page in PAGES if "benchmarks" not in page.parts and page.name != "CHANGELOG.md"]


def sentences(text: str) -> Iterator[str]:
    """Sentences of a page's prose; code in a sentence is one word, and of a link its text counts."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "CODE", text))
    for paragraph in re.split(r"\n\s*\n", text):
        if not re.match(r"\s*(?:[|>#]|[-*] |\d+\. | {4})", paragraph.lstrip("\n")):
            yield from re.split(r"(?<=[.:;?!)])\s+(?=[A-Z*(])", " ".join(paragraph.split()))


def too_long(text: str) -> list[str]:
    return [each for each in sentences(text) if len(each.split()) > LONGEST]


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_sentences_are_short(page: Path) -> None:
    assert too_long(page.read_text(encoding="utf-8")) == []


def test_a_long_sentence_is_found() -> None:
    long = "word " * LONGEST
    text = f"Short. A {long}[and more](page.md). Short.\n\n- {long}more\n\n```text\n{long}more\n```\n\n| {long}more |"
    assert [len(each.split()) for each in too_long(text)] == [LONGEST + 3]
