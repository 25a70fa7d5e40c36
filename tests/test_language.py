"""Docstrings, notes of constants and comments are short sentences with a subject of their own, in the project's words.

Tables and code are exempt; each item of a list, and each argument, is read by itself.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("distca", "megatron_patches", "benchmarks", "examples", "docs")
FILES = [*sorted(ROOT.glob("*.py")), *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]
NO_SUBJECT = {"Of", "Than", "That", "Those", "Who", "Whose", "As", "With", "What", "Which", "Where", "By"}
LONGEST = 25
PRIVATE = {
    r"\bas of :\w+:": "arguments are 'as in' another function",
    r"\bso it is\.": "say what is refused",
    r"\b(?:the|other|one|each|both|first|second) hal(?:f|ves)(?='s? | before| behind| after| of a micro)": (
        "a micro-batch has nano-batches, ping and pong"
    ),
    r"\bwhat is put out\b|\b(?:puts?|putting) out\b": "a layer has an output",
    r"\bfills? (?:ranks|up ranks)\b|\bwhat fills\b": "short documents are filler",
    r"\bnobody (?:else )?(?:has|reads|measured)\b": "say what is not there, not read or not measured",
    r"\bknows nothing of\b|\bsay nothing\b": "say what it does not do",
}
"""Words of this project's first authors, with what to say instead."""


def notes(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, and of every string that stands behind a constant."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every comment; lines of nothing else that follow each other are one."""
    found: list[tuple[int, str]] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.lstrip("#").strip()
        if token.type != tokenize.COMMENT or re.match(r"type:|noqa|mypy:|ruff:|fmt:|shellcheck", text):
            continue
        alone = not token.line[: token.start[1]].strip()
        if alone and last == token.start[0] - 1:
            found[-1] = found[-1][0], f"{found[-1][1]} {text}"
        else:
            found.append((token.start[0], text))
        last = token.start[0] if alone else -1
    return iter(found)


def sentences(text: str) -> Iterator[str]:
    """Sentences of a text; code in one is a single word."""
    text = re.sub(r"``[^`]*``|`[^`]*`", "CODE", text)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|] ?|\d+\. |[\w., *]+: |[\w./{}-]+ {3}))", text):
        if not re.match(r"\s*\||\s{4,}\S.*   ", paragraph.lstrip("\n")):
            yield from re.split(r"(?<=[.:;?!])\s+(?=[\w(\[\"'])", " ".join(paragraph.split()))


def too_long(text: str) -> list[str]:
    return [each for each in sentences(text) if len(re.findall(r"\S*\w\S*", each)) > LONGEST]


def private_terms(text: str) -> list[str]:
    """What to say in place of each private term of a text."""
    plain = " ".join(text.split())
    return [f"'{found[0]}': {instead}" for term, instead in PRIVATE.items() if (found := re.search(term, plain))]


def without_subject(source: str) -> list[int]:
    """Lines of the notes that begin without a subject."""
    return [line for line, text in notes(source) if text.split()[:1] and text.split()[0] in NO_SUBJECT]


@cache
def prose() -> list[tuple[str, str]]:
    """(place, text) of every note and comment of the product."""
    found = []
    for path in FILES:
        source = path.read_text("utf-8")
        found += [
            (f"{path.relative_to(ROOT)}:{line}", text) for each in (notes, comments) for line, text in each(source)
        ]
    return found


def test_notes_begin_with_a_subject() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in without_subject(path.read_text("utf-8"))]
    assert found == [], "Begin these with what they are about: 'Returns …', 'The …', 'Bytes of …'."


def test_a_note_without_a_subject_is_found() -> None:
    assert without_subject('LIMIT = 3\n"""Of a size."""\n\n\ndef f():\n    """Those to read."""\n') == [2, 6]


def test_sentences_are_short() -> None:
    found = [f"{place}: {each}" for place, text in prose() for each in too_long(text)]
    assert found == [], f"Sentences have one idea and at most {LONGEST} words."


def test_private_terms_are_not_used() -> None:
    found = [f"{place}: {each}" for place, text in prose() for each in private_terms(text)]
    assert found == []


@pytest.mark.parametrize("source", ["# {}\n", 'x = 1\n"""{}"""\n', 'def f(x):\n    """F.\n\n    x: {}\n    """\n'])
def test_a_long_sentence_and_a_private_term_are_found(source: str) -> None:
    written = source.format(f"{'word ' * LONGEST}rows of the half before. Short, with `code in it` and so on.")
    texts = [text for each in (notes, comments) for _, text in each(written)]
    assert sum(len(too_long(text)) for text in texts) == sum(len(private_terms(text)) for text in texts) == 1
