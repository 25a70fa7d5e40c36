"""The pages that are written from the code."""

import runpy
from dataclasses import fields
from pathlib import Path

import pytest

import distca
from distca.cad_options import CadOptions
from distca.train.config.cli import known_settings

DOCS = Path(__file__).parents[2] / "docs"
PAGES = runpy.run_path(str(DOCS / "write_settings.py"))["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run python docs/write_settings.py"


def test_every_setting_is_there() -> None:
    page = PAGES["settings.md"]()
    assert [name for name in known_settings() if page.count(f"| `{name}` ") != 1] == []


def test_the_page_about_the_api_has_every_public_name_and_option() -> None:
    page = runpy.run_path(str(DOCS / "api_page.py"))["api_page"]()
    assert [name for name in distca.__all__ if page.count(f"\n## {name}\n") != 1] == []
    assert [option.name for option in fields(CadOptions) if page.count(f"\n- `{option.name}`: ") != 1] == []
    assert "### CAD.forward_backward" in page and "`forward_backward(" in page
