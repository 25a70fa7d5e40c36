"""Links between pages and to files lead somewhere, also to headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, name_of

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)", re.DOTALL)


def links(text: str) -> list[str]:
    """Targets of all links but those to the web; code is left out."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", lambda code: "" if "](" in code[0] else code[0], text)
    return [target for target in LINK.findall(text) if not re.match("[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """Of all headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(next(each for each in [anchor, *(f"{anchor}-{n}" for n in range(1, 99))] if each not in found))
    return found


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    wrong = []
    for target in links(page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        to = page.parent / path if path else page
        if not to.exists() or (anchor and anchor not in anchors(to.read_text(encoding="utf-8"))):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_every_page_is_linked() -> None:
    seen = {(page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in links(page.read_text())}
    assert [name_of(page) for page in PAGES if page.resolve() not in seen and page != ROOT / "README.md"] == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# The `a.b` of it\n[a](page.md#the-ab-of-it) [b](none.md) [c](#x) `[d](none.md)`\n![e](e.png)\n")
    assert broken(page) == ["none.md", "#x", "e.png"]
