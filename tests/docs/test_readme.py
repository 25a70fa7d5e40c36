"""README.md: short, with lines of the example, and figures that are in the files it names."""

from __future__ import annotations

import ast
import json
import re

from tests.docs.pages import ROOT, blocks, without_comment

README = ROOT / "README.md"
EXAMPLE = ROOT / "examples" / "own_training_loop.py"


def code(lines: list[str] | tuple[str, ...]) -> list[str]:
    return [line for line in (without_comment(line).strip() for line in lines) if line]


def test_it_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 130


def test_the_public_face_is_the_examples() -> None:
    (block,) = blocks(README, "python")
    ast.parse("\n".join(block.lines))
    assert [line for line in code(block.lines) if line not in code(EXAMPLE.read_text().splitlines())] == []


def test_the_tutorial_explains_the_examples_lines() -> None:
    shown = [code(block.lines) for block in blocks(ROOT / "docs" / "tutorial.md", "python")]
    assert len(shown) == 4
    assert [line for lines in shown for line in lines if line not in code(EXAMPLE.read_text().splitlines())] == []


def test_figures_are_those_of_the_files() -> None:
    rows = re.findall(
        r"^\| \[.*?\]\((\S+?\.json)\).*?\| ([\d,]+) → ([\d,]+) \| \*\*([\d.]+)×\*\*", README.read_text(), re.MULTILINE
    )
    assert len(rows) == 5
    for path, before, after, gain in rows:
        (cell,) = json.loads((ROOT / path).read_text())["cells"].values()
        speeds = {name: mode["tokens_per_s"] for name, mode in cell["modes"].items()}
        assert [f"{speeds['cp2-keep']:,.0f}", f"{speeds['distca']:,.0f}"] == [before, after], path
        assert f"{speeds['distca'] / speeds['cp2-keep']:.3f}" == gain, path
