"""Docstrings and notes of constants are sentences with a subject of their own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
NO_SUBJECT = {"Of", "Than", "That", "Those", "Who", "Whose", "As", "With", "What", "Which", "Where", "By"}


def notes(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, and of every string that stands behind a constant."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def without_subject(source: str) -> list[int]:
    """Lines of the notes that begin without a subject."""
    return [line for line, text in notes(source) if text.split()[:1] and text.split()[0] in NO_SUBJECT]


def test_notes_begin_with_a_subject() -> None:
    files = [path for folder in ("distca", "megatron_patches") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in without_subject(path.read_text("utf-8"))]
    assert found == [], "Begin these with what they are about: 'Returns …', 'The …', 'Bytes of …'."


def test_a_note_without_a_subject_is_found() -> None:
    assert without_subject('LIMIT = 3\n"""Of a size."""\n\n\ndef f():\n    """Those to read."""\n') == [2, 6]
