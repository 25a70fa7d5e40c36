"""README.md: short, with lines of the example, and figures that are in the files it names."""

from __future__ import annotations

import ast

from benchmarks import step_time
from benchmarks.when_it_pays import with_table
from tests.docs.pages import ROOT, blocks, without_comment

README = ROOT / "README.md"
EXAMPLE = ROOT / "examples" / "own_training_loop.py"


def code(lines: list[str] | tuple[str, ...]) -> list[str]:
    return [line for line in (without_comment(line).strip() for line in lines) if line]


def test_it_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 110


def test_pages_are_short() -> None:
    pages = [ROOT / "README.Installation.md", *(ROOT / "docs").glob("*.md")]
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    assert words <= 18_000, f"{words:,} words: say less, or move figures to benchmarks/results/README.md"


def test_the_public_face_is_the_examples() -> None:
    (block,) = blocks(README, "python")
    ast.parse("\n".join(block.lines))
    assert [line for line in code(block.lines) if line not in code(EXAMPLE.read_text().splitlines())] == []


def test_the_page_about_scripts_explains_the_examples_lines() -> None:
    shown = [code(block.lines) for block in blocks(ROOT / "docs" / "own_script.md", "python")]
    assert len(shown) == 4
    assert [line for lines in shown for line in lines if line not in code(EXAMPLE.read_text().splitlines())] == []


def test_the_table_of_when_it_pays_is_that_of_the_results() -> None:
    page = README.read_text(encoding="utf-8")
    assert with_table(page) == page, "python -m benchmarks.when_it_pays writes it"
    assert page.count("×**") >= 8


def test_the_table_of_a_steps_time_is_that_of_the_results() -> None:
    page = step_time.PAGE.read_text(encoding="utf-8")
    assert step_time.with_table(page) == page, "python -m benchmarks.step_time writes it"
    assert page.count("| 2 × H") == 10
