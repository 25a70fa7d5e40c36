"""Imports go one way: a package imports only what is below it, and Megatron-Core only where it is known.

Imports are read from the sources, those inside functions and for type checkers too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the bottom to the top; no row imports from its own, but each package from itself.
ROWS = (
    (
        "distca.cad_options",
        "distca.errors",
        "distca.json_file",
        "distca.log",
        "distca.sizes",
        "distca.versions",
        "distca.words",
    ),
    ("distca.plan", "distca.yaml_file"),
    ("distca.cluster", "distca.device"),
    ("distca.ops",),
    ("distca.attention", "distca.data", "distca.models", "distca.recurrent", "distca.transport"),
    ("distca.baselines", "distca.runtime", "distca.testing"),
    ("distca.profile", "distca.simulate"),
    ("megatron_patches",),
    ("distca.parity",),
    ("distca.train",),
    ("distca.commands",),
)
KNOWS_MEGATRON = {"megatron_patches", "distca.commands", "distca.parity", "distca.train"}
# The public names of `distca` are loaded when they are asked for; the names are checked against this.
FACE = {
    f"megatron_patches.{name}"
    for name in ("api", "model.model_options", "steps.per_document", "steps.step_documents", "ranks.world")
} | {"distca.runtime.attention_server"}
# With what they import of ours.
NUMPY_ONLY = {"distca", "distca.errors", "distca.json_file", "distca.plan", "distca.sizes"}


def package_of(module: str) -> str:
    """distca.plan of distca.plan.scheduler.state; megatron_patches as a whole."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "distca" else parts[0]


def imports_of(path: Path, root: Path) -> Iterator[str]:
    """Full names of the modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                file = root.joinpath(*member.split("."))
                # `from distca import plan` imports distca.plan.
                is_module = file.is_dir() or file.with_suffix(".py").exists() or node.module == "distca"
                yield member if is_module else str(node.module)


@cache
def all_imports(root: Path = ROOT) -> list[tuple[str, str]]:
    """(module, module that it imports), of all that is installed."""
    found = []
    for folder in ("distca", "megatron_patches"):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found += [(module, imported) for imported in imports_of(path, root)]
    return [each for each in found if each[0] != "distca" or each[1] not in FACE]


def not_downward(imports: list[tuple[str, str]]) -> list[str]:
    """Imports among ours that lead up or aside."""
    height = {package: row for row, packages in enumerate(ROWS) for package in packages}
    wrong = []
    for module, imported in imports:
        above, below = package_of(module), package_of(imported)
        if below.split(".")[0] not in ("distca", "megatron_patches") or above == below:
            continue
        if below not in height:  # a member of distca itself, such as its version
            continue
        if above not in height or height[above] <= height[below]:
            wrong.append(f"{module} imports {imported}")
    return wrong


def test_every_package_has_its_place() -> None:
    placed = {package for row in ROWS for package in row}
    there = {f"distca.{path.stem}" for path in (ROOT / "distca").iterdir() if path.suffix == ".py" or path.is_dir()}
    there -= {"distca.__init__", "distca.__pycache__", "distca.py"}
    assert there - placed == set() and placed - there == {"megatron_patches"}


def test_imports_lead_down() -> None:
    assert not_downward(all_imports()) == []


def circle(imports: list[tuple[str, str]]) -> list[str]:
    """Files that import each other, the first one again at the end; none where there are none."""
    graph: dict[str, set[str]] = {}
    for module, imported in imports:
        graph.setdefault(module, set()).add(imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other() -> None:
    assert circle(all_imports()) == []


def between_folders(imports: list[tuple[str, str]], package: str) -> list[tuple[str, str]]:
    """The same among what lies in a package: files in it, and folders as a whole. The package itself, which hands on
    names of all, does not count."""

    def part_of(module: str) -> str | None:
        inside = module.removeprefix(f"{package}.")
        return None if inside == module else inside.split(".")[0]

    parts = [(part_of(module), part_of(imported)) for module, imported in imports]
    return sorted({(above, below) for above, below in parts if above and below and above != below})


def test_folders_of_planning_import_one_way() -> None:
    imports = between_folders(all_imports(), "distca.plan")
    assert circle(imports) == []
    assert ("scheduler", "plan") in imports and ("place", "layout") in imports, "or the test sees nothing"


def test_types_of_planning_import_no_algorithm() -> None:
    wanted: dict[str, set[str]] = {}
    for above, below in between_folders(all_imports(), "distca.plan"):
        wanted.setdefault(above, set()).add(below)
    below = ["layout", "tasks", "network", "plan", "geometry", "kinds"]
    for module in below:
        assert not wanted.get(module, set()) - {*below, "sorting"}, f"{module} imports more than types"


def test_folders_that_import_each_other_are_found() -> None:
    files = [("distca.plan.a.x", "distca.plan.b.y"), ("distca.plan.b.z", "distca.plan.a.w"), ("distca.plan", "x")]
    assert circle(files) == [] and set(circle(between_folders(files, "distca.plan"))) == {"a", "b"}


def test_files_that_import_each_other_are_found(tmp_path: Path) -> None:
    (tmp_path / "distca" / "plan").mkdir(parents=True)
    (tmp_path / "distca" / "plan" / "x.py").write_text("if TYPE_CHECKING:\n    from distca.plan.y import Y\n")
    (tmp_path / "distca" / "plan" / "y.py").write_text("def later():\n    from distca.plan.x import X\n")
    assert set(circle(all_imports(tmp_path))) == {"distca.plan.x", "distca.plan.y"}


def test_megatron_is_imported_only_where_it_is_known() -> None:
    known = {(module, name) for module, name in all_imports() if name.split(".")[0] in ("megatron", "megatron_patches")}
    assert {module for module, _ in known if package_of(module) not in KNOWS_MEGATRON} == set()
    assert "megatron_patches" in {package_of(module) for module, _ in known}, "or the test sees nothing"


def test_planning_imports_numpy_only() -> None:
    imports = [name for module, name in all_imports() if package_of(module) in NUMPY_ONLY]
    foreign = {name for name in imports if name.split(".")[0] not in sys.stdlib_module_names}
    assert {package_of(name) for name in foreign} - NUMPY_ONLY == {"numpy"}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def later():\n    from distca.train.run import main\n", "distca.plan.x imports distca.train.run"),
        ("from distca import transport\n", "distca.plan.x imports distca.transport"),
        ("import megatron_patches.model.gpt\n", "distca.plan.x imports megatron_patches.model.gpt"),
        ("if TYPE_CHECKING:\n    from distca.runtime import AttentionPool\n", "distca.plan.x imports distca.runtime"),
    ],
)
def test_an_import_upward_is_found(tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "distca" / "plan").mkdir(parents=True)
    (tmp_path / "distca" / "plan" / "x.py").write_text(source)
    assert not_downward(all_imports(tmp_path)) == [said]
