"""Every :func:, :class: and :meth: in our docstrings, and the like, names something that is there. Nothing of ours is
imported: names are read from the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT

OURS = ("distca", "megatron_patches", "benchmarks")
REFERENCE = re.compile(r":\w+:`~?([^`]+)`")


class Sources:
    """All definitions in a tree, by their full names.

    Attributes:
        defined: full names.
        same: full name of what is imported under another, and of each class its bases.
        said: full name of where something is said, and what.
    """

    def __init__(self, root: Path) -> None:
        self.defined: set[str] = set()
        self.same: dict[str, list[str]] = {}
        self.said: list[tuple[str, str]] = []
        for path in (path for package in OURS for path in sorted((root / package).rglob("*.py"))):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.defined.add(name)
            self._read(ast.parse(path.read_text(encoding="utf-8")), name, name)

    def _read(self, node: ast.AST, scope: str, module: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = scope
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                inside = f"{scope}.{child.name}"
                self.defined.add(inside)
                if isinstance(child, ast.ClassDef):
                    self.same[inside] = [f"{module}.{ast.unparse(base)}" for base in child.bases]
            elif isinstance(child, ast.ImportFrom):
                for each in child.names:
                    self.same[f"{scope}.{each.asname or each.name}"] = [f"{child.module}.{each.name}"]
            elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                self.defined.add(f"{scope}.{child.id}")
            elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                self.said += [(scope, name) for name in REFERENCE.findall(" ".join(str(child.value.value).split()))]
            self._read(child, inside, module)

    def has(self, name: str) -> bool:
        """Whether there is a thing of this full name; what others define is taken to be there."""
        if name in self.defined or name.split(".")[0] not in OURS:
            return True
        owner, _, member = name.rpartition(".")
        others = [*self.same.get(name, ()), *(f"{other}.{member}" for other in self.same.get(owner, ()))]
        return any(self.has(other) for other in others)

    def missing(self) -> Iterator[str]:
        """References to nothing: as a full name, or seen from where they stand."""
        for scope, name in self.said:
            parts = scope.split(".")
            seen = [".".join((*parts[:length], name)) for length in range(len(parts) + 1)]
            if not any(self.has(each) for each in seen if each.split(".")[0] in OURS):
                yield f"{scope}: {name}"


def test_references_name_what_is_there() -> None:
    sources = Sources(ROOT)
    assert list(sources.missing()) == []
    assert len(sources.said) > 100, "or the test sees nothing"


def test_a_reference_to_nothing_is_found(tmp_path: Path) -> None:
    (tmp_path / "distca").mkdir()
    (tmp_path / "distca" / "x.py").write_text(
        '''
"""See :func:`late`, :func:`distca.y.late`, :meth:`X.run`, :meth:`Y.walk` and :func:`torch.zeros`."""

class X:
    """As :meth:`run` does, not as :meth:`distca.x.X.walk`."""
    def run(self):
        """Not :func:`gone`, but :class:`X`, and :func:`torch.ones`."""

class Y(X):
    """:meth:`run`."""
'''
    )
    wanted = ["distca.x: late", "distca.x: distca.y.late", "distca.x: Y.walk", "distca.x: torch.zeros"]
    wanted += ["distca.x.X: distca.x.X.walk", "distca.x.X.run: gone", "distca.x.X.run: torch.ones"]
    assert list(Sources(tmp_path).missing()) == wanted
