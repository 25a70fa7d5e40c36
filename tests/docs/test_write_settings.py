"""The pages that are written from the code."""

import runpy
from pathlib import Path

import pytest

from distca.train.config.cli import known_settings

DOCS = Path(__file__).parents[2] / "docs"
PAGES = runpy.run_path(str(DOCS / "write_settings.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run python docs/write_settings.py"


def test_every_setting_is_there() -> None:
    page = PAGES["settings.md"]()
    assert [name for name in known_settings() if page.count(f"| `{name}` ") != 1] == []
