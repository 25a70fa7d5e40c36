"""The pages that people read, and what is in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "README.Installation.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        line: number of its first line in the page.
        lines: what is between the fences.
    """

    line: int
    lines: tuple[str, ...]


def name_of(page: Path) -> str:
    """Of a page, from the project's folder."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> Iterator[Block]:
    """A page's fenced blocks of a language."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Block(text.count("\n", 0, found.start(1)) + 1, tuple(found[1].splitlines()))


def without_comment(line: str) -> str:
    """A line of Python or bash without what follows two spaces and a hash, or all of it after a leading hash."""
    return re.sub(r"(^\s*|\s{2,})#.*", "", line).rstrip()
