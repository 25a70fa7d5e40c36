"""docs/faq.md quotes messages as the code says them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from distca.train.config.names import with_settings
from tests.docs.pages import ROOT

ANY = "…"


def messages(path: Path) -> Iterator[str]:
    """Every string of a file, with … for what is put into it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else ANY for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub("%[sd]", ANY, node.value)


def test_messages_are_the_codes() -> None:
    files = [path for folder in ("distca", "megatron_patches") for path in (ROOT / folder).rglob("*.py")]
    said = with_settings("\n".join(message for path in files for message in messages(path)))
    page = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    quoted = re.findall("^> (.*)$", page, re.MULTILINE)
    assert len(quoted) >= 20
    assert [message for message in quoted if message.removesuffix(ANY) not in said] == []
