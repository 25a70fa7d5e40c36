"""The page about the public API, from docstrings alone: nothing of the project is imported, so torch need not be there.

The site has it as docs/api.md; ``python docs/api_page.py`` prints it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MORE = {"CAD": ("CadArguments", "megatron_patches.arguments"), "CadArguments": ("CadOptions", "distca.cad_options")}
"""The class that describes a thing's arguments, where that is another one."""


def api_page() -> str:
    """Every public name of ``distca``, with its methods, arguments and errors."""
    lines = ["# API", "", "Names of `distca`, from their docstrings."]
    for name, module in _public().items():
        lines += _section(name, module)
    return "\n".join(lines) + "\n"


def _public() -> dict[str, str]:
    """Public names, and the module that each is from."""
    source = ast.parse((ROOT / "distca" / "__init__.py").read_text(encoding="utf-8"))
    values = {
        target.id: node.value
        for node in source.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    face: dict[str, str] = ast.literal_eval(values["_FACE"])
    return face


def _section(name: str, module: str) -> Iterator[str]:
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    (node,) = [
        each
        for each in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(each, ast.ClassDef | ast.FunctionDef) and each.name == name
    ]
    yield from ("", f"## {name}", "")
    if isinstance(node, ast.FunctionDef):
        yield from (f"`{_signature(node)}`", "")
    yield from _text(ast.get_docstring(node) or "")
    while name in MORE:
        name, module = MORE[name]
        yield from _arguments(name, module)
    for method in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            yield from ("", f"### {node.name}.{method.name}", "", f"`{_signature(method)}`", "")
            yield from _text(ast.get_docstring(method) or "")


def _arguments(name: str, module: str) -> Iterator[str]:
    """The attributes of a class of options."""
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (node,) = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name]
    found = (ast.get_docstring(node) or "").partition("Attributes:\n")[2]
    yield from _text(f"Keywords:\n{found}")


def _signature(node: ast.FunctionDef) -> str:
    """The name of a function with its arguments, or of a property without, and what it returns."""
    arguments = ast.unparse(node.args).removeprefix("self").removeprefix(", ")
    called = "" if any(ast.unparse(each) == "property" for each in node.decorator_list) else f"({arguments})"
    returns = f" → {ast.unparse(node.returns)}" if node.returns and ast.unparse(node.returns) != "None" else ""
    return f"{node.name}{called}{returns}"


def _text(docstring: str) -> Iterator[str]:
    """Markdown of a docstring whose sections begin as "Args:" does; what is indented below is a list."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", docstring).replace("``", "`")
    for part in re.split(r"\n(?=[A-Z]\w+:\n)", text):
        heading = re.match(r"([A-Z]\w+):\n", part)
        if heading is None:
            yield from ("", *part.splitlines(), "")
            continue
        body = part[heading.end() :]
        yield from ("", f"**{heading[1]}:**", "")
        entries = re.findall(r"^ {4}(\S.*(?:\n {5,}.*)*)", body, re.MULTILINE)
        yield from ("- " + re.sub(r"^([\w, ]+):", r"`\1`:", " ".join(entry.split())) for entry in entries)


if __name__ == "__main__":
    import sys

    sys.stdout.write(api_page())
