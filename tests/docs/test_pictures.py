"""The pictures of the pages: each is shown, and those that a script draws are the code's."""

from __future__ import annotations

import re
import runpy

from tests.docs.pages import PAGES, ROOT
from tests.test_import_contract import ROWS

IMAGES = ROOT / "docs" / "images"
DRAWN = runpy.run_path(str(ROOT / "docs" / "draw_pictures.py"))


def test_every_picture_is_shown() -> None:
    links = [link for page in PAGES for link in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8"))]
    shown = {link.rpartition("/")[2] for link in links}
    assert {path.name for path in IMAGES.iterdir()} - shown == set()


def test_the_picture_of_the_tree_has_the_rows_of_the_import_contract() -> None:
    rows = [{name.replace("/", ".") for name, _ in row} for row in reversed(DRAWN["ROOMS"])]
    packages = [set(row) - {"distca.yaml_file"} for row in ROWS[1:]]
    assert rows == packages
