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


def test_figures_are_those_of_the_file() -> None:
    cells = json.loads((ROOT / "benchmarks" / "results" / "linears_2_gpus_128k.json").read_text())["cells"]
    rows = re.findall(
        r"^\| (\w+), (bf16|FP8)(?: \(delayed\))? "
        r"\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| \*\*([\d.]+)×\*\* \| \*\*([\d.]+)×\*\*",
        README.read_text(),
        re.MULTILINE,
    )
    assert len(rows) == 4
    for mix, numbers, *said in rows:
        modes, kind = cells[f"{mix.lower()} 128K"], {"bf16": "te", "FP8": "delayed"}[numbers]
        packed, cp, distca = (modes[mode][kind]["tokens_per_s"] for mode in ("packed", "cp2-keep", "distca"))
        speeds = [f"{speed:,.0f}" for speed in (packed, cp, distca)]
        assert [*speeds, f"{distca / packed:.3f}", f"{distca / cp:.3f}"] == said
