"""The pages that people read, and what is in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "README.Installation.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[list[tuple[int, str]]]:
    """The lines of a page's fenced blocks of a language, each with its number."""
    text = text_of(page)
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [list(enumerate(block[1].splitlines(), text.count("\n", 0, block.start(1)) + 1)) for block in found]


def without_comment(line: str) -> str:
    """A line of Python or bash without what follows two spaces and a hash, or all of it after a leading hash."""
    return re.sub(r"(^\s*|\s{2,})#.*", "", line).rstrip()
