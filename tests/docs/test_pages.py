"""Pages are right: their links, pictures, sentences, Python, quoted messages, and all that is written from code."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import distca
from benchmarks.tables import PART, written
from distca.cad_options import CadOptions
from distca.train.config.cli import known_settings
from distca.train.config.names import with_settings
from tests.docs.pages import PAGES, ROOT, blocks, name_of, text_of, without_comment
from tests.test_import_contract import ROWS

DOCS = ROOT / "docs"
MANUAL = [ROOT / "README.Installation.md", *sorted(DOCS.glob("*.md"))]
LONGEST = 25  # words of a sentence
FOLDERS = ("benchmarks", "configs", "csrc", "distca", "docs", "examples", "megatron_patches", "scripts", "tests")
OF_THE_EXAMPLE, THAT_RUN = ("README.md", "docs/own_script.md"), ("docs/data.md", "docs/planning.md")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FROM_CODE = runpy.run_path(str(DOCS / "write_settings.py"))["PAGES"]
every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def links(text: str) -> list[str]:
    """Targets of all links but those to the web; code is left out."""
    text = re.sub(r"`[^`\n]*`", lambda code: "" if "](" in code[0] else code[0], FENCED.sub("", text))
    return [link for link in re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", text) if not re.match("[a-z]+:", link)]


def anchors(text: str) -> set[str]:
    """Names of all headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        found.add(next(each for each in [plain, *(f"{plain}-{n}" for n in range(1, 99))] if each not in found))
    return found


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    wrong = []
    for target in links(text_of(page)):
        path, _, anchor = target.partition("#")
        to = page.parent / path if path else page
        if not to.exists() or (anchor and anchor not in anchors(text_of(to))):
            wrong.append(target)
    return wrong


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def absent(text: str) -> list[str]:
    """Paths from the root, alone or with the name of a test, to which nothing belongs."""
    wrong = []
    for path, test in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*\w/?)(?:::(\w+))?", text):
        file = ROOT / path
        if not file.exists() or (test and f"\ndef {test}(" not in file.read_text(encoding="utf-8")):
            wrong.append(f"{path}::{test}" if test else path)
    return wrong


@every_page
def test_files_and_tests_are_there(page: Path) -> None:
    assert absent(text_of(page)) == []


def test_every_page_is_linked_and_every_picture_shown() -> None:
    seen = {(page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in links(text_of(page))}
    assert [name_of(page) for page in PAGES if page.resolve() not in seen and page != ROOT / "README.md"] == []
    shown = {Path(link).name for page in PAGES for link in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text_of(page))}
    assert {path.name for path in (DOCS / "images").iterdir()} - shown == set()


def too_long(text: str) -> list[str]:
    """Sentences with more than LONGEST words; code is one word, of a link its text counts, and tables, lists, blocks
    and quotes are exempt."""
    text = re.sub(r"<!--.*?-->|!\[[^\]]*\]\([^)]*\)", "", FENCED.sub("", text), flags=re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "CODE", text))
    prose = [each for each in re.split(r"\n\s*\n", text) if not re.match(r"\n*\s*(?:[|>#]|[-*] |\d+\. | {4})", each)]
    each = [one for part in prose for one in re.split(r"(?<=[.:;?!)])\s+(?=[A-Z*(])", " ".join(part.split()))]
    return [sentence for sentence in each if len(sentence.split()) > LONGEST]


@every_page
def test_sentences_are_short(page: Path) -> None:
    if "benchmarks" not in page.parts and page.name != "CHANGELOG.md":
        assert too_long(text_of(page)) == []


def test_pages_are_short() -> None:
    assert len(text_of(ROOT / "README.md").splitlines()) <= 110
    words = sum(len(text_of(page).split()) for page in MANUAL)
    assert words <= 18_000, f"{words:,} words: say less, or move figures to benchmarks/results/README.md"


def test_python_works() -> None:
    """Blocks of two pages are lines of the example, and of two they run; names of ``distca`` are there in all."""
    example = {without_comment(line).strip() for line in text_of(ROOT / "examples/own_training_loop.py").splitlines()}
    found = {name_of(page): blocks(page, "python") for page in PAGES}
    assert [len(found[name]) for name in (*OF_THE_EXAMPLE, *THAT_RUN)] == [1, 4, 1, 1]
    for name, block in ((name, block) for name, each in found.items() for block in each):
        code = "\n".join(line for _, line in block)
        if name in OF_THE_EXAMPLE:
            assert [line for line in map(without_comment, code.splitlines()) if line.strip() not in example] == []
        elif name in THAT_RUN:
            exec(compile(code, name, "exec"), {})
        if name != "docs/own_script.md":  # which has parts of functions
            ast.parse(code)
        assert set(re.findall(r"\bdistca\.(\w+)", code)) <= {*distca.__all__, "data", "plan"}, name


def messages(path: Path) -> Iterator[str]:
    """Every string of a file, with … for what is put into it."""
    for node in ast.walk(ast.parse(text_of(path))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub("%[sd]", "…", node.value)


def test_quoted_messages_are_the_codes() -> None:
    files = [path for folder in ("distca", "megatron_patches") for path in (ROOT / folder).rglob("*.py")]
    said = with_settings("\n".join(message for path in files for message in messages(path)))
    quoted = re.findall("^> (.*)$", text_of(DOCS / "faq.md"), re.MULTILINE)
    assert len(quoted) >= 20
    assert [message for message in quoted if message.removesuffix("…") not in said] == []


@every_page
def test_what_comes_from_results_and_code_is_up_to_date(page: Path) -> None:
    text = text_of(page)
    assert written(text) == text, "run python -m benchmarks.tables"
    assert not re.search(r"^\s*<!-- (?:benchmarks|until)[^>]*-->.", text, re.MULTILINE), "it would be read as HTML"
    if page.parent == DOCS and page.name in FROM_CODE:
        assert FROM_CODE[page.name]() == text, "run python docs/write_settings.py"


def test_what_comes_from_results_is_all_there() -> None:
    parts = [part for page in PAGES for part in PART.finditer(text_of(page))]
    lines = {f"{part[2]}.{part[3]}".removeprefix("benchmarks."): part[4].count("\n| ") - 1 for part in parts}
    rows = {
        "plans_on_a_network": 24,
        "calibration": 2,
        "papers_grid": 8,
        "many_servers": 5,
        "slow_network": 4,
        "experts": 8,
    }
    rows = {f"tables.{name}": count for name, count in rows.items()} | {"when_it_pays.table": 8, "step_time.table": 10}
    rows |= {"longest_contexts.table": 2, "attention_in_steps.table": 12, "tables.predicted_apart": 16}
    rows |= {"one_nano_batch.table": 5}
    assert {name: count for name, count in lines.items() if count > 0} == rows
    assert len(lines) == len(rows) + 15 and text_of(ROOT / "README.md").count("×**") >= 8


def test_every_name_is_on_its_page() -> None:
    """Settings, what ``distca`` has, and packages in the picture of the tree."""
    page = FROM_CODE["settings.md"]()
    assert [name for name in known_settings() if page.count(f"| `{name}` ") != 1] == []
    page = runpy.run_path(str(DOCS / "api_page.py"))["api_page"]()
    assert [name for name in distca.__all__ if page.count(f"\n## {name}\n") != 1] == []
    assert [option.name for option in fields(CadOptions) if page.count(f"\n- `{option.name}`: ") != 1] == []
    assert "### CAD.forward_backward" in page and "`forward_backward(" in page
    rooms = runpy.run_path(str(DOCS / "draw_pictures.py"))["ROOMS"]
    drawn = [{name.replace("/", ".") for name, _ in row} for row in reversed(rooms)]
    assert drawn == [set(row) - {"distca.yaml_file"} for row in ROWS[1:]]


def test_mistakes_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# The `a.b` of it\n[a](page.md#the-ab-of-it) [b](none.md) [c](#x) `[d](none.md)`\n![e](e.png)\n")
    assert broken(page) == ["none.md", "#x", "e.png"]
    here = "tests/docs/test_pages.py"
    assert absent(f"`{here}` `{here}::test_mistakes_are_found` `{here}::test_mistakes` `docs/none.md`") == [
        f"{here}::test_mistakes",
        "docs/none.md",
    ]
    long = "word " * LONGEST
    text = f"Short. A {long}[and more](page.md). Short.\n\n- {long}more\n\n```text\n{long}more\n```\n\n| {long}more |"
    assert [len(each.split()) for each in too_long(text)] == [LONGEST + 3]
    part = "a <!-- benchmarks.tables.calibration_orders -->{}<!-- until here --> b"
    assert written(part.format("71 of 73 pairs")) == part.format("75 of 76 pairs")
