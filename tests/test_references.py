"""Every :func:, :class: and :meth: in our docstrings, and the like, names something that is there. Nothing of ours is
imported: names are read from the sources."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = ("distca", "megatron_patches", "benchmarks")


class Sources:
    """All definitions in a tree: full names, the other names of what is imported and of classes' bases, references."""

    def __init__(self, root: Path) -> None:
        self.defined: set[str] = set()
        self.same: dict[str, list[str]] = {}
        self.said: list[tuple[str, str]] = []
        for path in (path for package in OURS for path in sorted((root / package).rglob("*.py"))):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            self.defined.add(name)
            self._read(ast.parse(path.read_text(encoding="utf-8")), name, name)

    def _read(self, node: ast.AST, scope: str, module: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = scope
            match child:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    inside = f"{scope}.{child.name}"
                    self.defined.add(inside)
                    self.same[inside] = [f"{module}.{ast.unparse(base)}" for base in getattr(child, "bases", ())]
                case ast.ImportFrom():
                    for each in child.names:
                        self.same[f"{scope}.{each.asname or each.name}"] = [f"{child.module}.{each.name}"]
                case ast.Name(ctx=ast.Store()):
                    self.defined.add(f"{scope}.{child.id}")
                case ast.Expr(value=ast.Constant(value=str(text))):
                    self.said += [(scope, name) for name in re.findall(r":\w+:`~?([^`]+)`", " ".join(text.split()))]
            self._read(child, inside, module)

    def has(self, name: str) -> bool:
        """Whether there is a thing of this full name; what others define is taken to be there."""
        owner, _, member = name.rpartition(".")
        others = [*self.same.get(name, ()), *(f"{other}.{member}" for other in self.same.get(owner, ()))]
        return name in self.defined or name.split(".")[0] not in OURS or any(map(self.has, others))

    def missing(self) -> list[str]:
        """References to nothing: as a full name, or seen from where they stand."""
        found = []
        for scope, name in self.said:
            parts = scope.split(".")
            seen = [".".join((*parts[:length], name)) for length in range(len(parts) + 1)]
            if not any(self.has(each) for each in seen if each.split(".")[0] in OURS):
                found.append(f"{scope}: {name}")
        return found


def test_references_name_what_is_there() -> None:
    sources = Sources(ROOT)
    assert sources.missing() == []
    assert len(sources.said) > 100, "or the test sees nothing"


def test_a_reference_to_nothing_is_found(tmp_path: Path) -> None:
    (tmp_path / "distca").mkdir()
    (tmp_path / "distca" / "x.py").write_text(
        '''
"""See :func:`late`, :func:`distca.y.late`, :meth:`X.run`, :meth:`Y.walk` and :func:`torch.zeros`."""
class X:
    """As :meth:`run` does, not as :meth:`distca.x.X.walk`."""
    def run(self): """Not :func:`gone`, but :class:`X`, and :func:`torch.ones`."""
class Y(X): """:meth:`run`."""
'''
    )
    wanted = [": late", ": distca.y.late", ": Y.walk", ": torch.zeros"]
    wanted += [".X: distca.x.X.walk", ".X.run: gone", ".X.run: torch.ones"]
    assert Sources(tmp_path).missing() == [f"distca.x{each}" for each in wanted]
