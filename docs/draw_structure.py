"""Draw which folder imports which, and count files and lines: today's tree beside an older one.

python docs/draw_structure.py OLD_COMMIT          # writes docs/images/structure.svg, prints the tables
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
# From the bottom to the top, as in tests/test_import_contract.py.
ROWS = (
    ("plan",),
    ("cluster", "device"),
    ("data", "models", "attention", "ops", "transport"),
    ("baselines", "testing", "runtime"),
    ("simulate", "profile"),
    ("megatron_patches",),
    ("parity",),
    ("train",),
    ("commands",),
)


@dataclass(frozen=True)
class Tree:
    """Python files and shell scripts of one commit, by path."""

    files: dict[str, str]

    @staticmethod
    def of(commit: str) -> Tree:
        packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            members = [each for each in archive.getmembers() if each.isfile() and each.name.endswith((".py", ".sh"))]
            return Tree({each.name: archive.extractfile(each).read().decode() for each in members})  # type: ignore[union-attr]

    def folder(self, path: str) -> str:
        """The package that a file belongs to: plan, transport, ..., megatron_patches."""
        parts = path.split("/")
        return parts[0] if parts[0] != "distca" else parts[1] if len(parts) > 2 else "distca"

    def imports(self) -> Counter[tuple[str, str]]:
        """How often files of one folder import from another."""
        found: Counter[tuple[str, str]] = Counter()
        for path, text in self.files.items():
            if not path.endswith(".py") or not path.startswith(("distca/", "megatron_patches/")):
                continue
            for node in ast.walk(ast.parse(text)):
                names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                for name in names:
                    parts = name.split(".")
                    if parts[0] not in ("distca", "megatron_patches"):
                        continue
                    target = parts[0] if parts[0] == "megatron_patches" else parts[1] if len(parts) > 1 else "distca"
                    source = self.folder(path)
                    if source != target and source != "distca":
                        found[source, target] += 1
        return found

    def lines(self, *starts: str, suffix: str = ".py") -> tuple[int, int]:
        """(files, lines) below some folders."""
        texts = [text for path, text in self.files.items() if path.startswith(starts) and path.endswith(suffix)]
        return len(texts), sum(text.count("\n") for text in texts)


def draw(axes: object, tree: Tree, title: str) -> None:
    """One tree: a box a folder, an arrow an import; red arrows lead up or aside."""
    places = {
        name: (2.2 * (at - (len(row) - 1) / 2), 1.3 * height)
        for height, row in enumerate(ROWS)
        for at, name in enumerate(row)
    }
    height = {name: y for name, (_, y) in places.items()}
    axes.set(title=title, xlim=(-4.6, 4.6), ylim=(-0.7, 1.3 * len(ROWS) - 0.5))  # type: ignore[attr-defined]
    axes.axis("off")  # type: ignore[attr-defined]
    for (source, target), count in sorted(tree.imports().items()):
        if source not in places or target not in places:
            continue
        up = height[target] >= height[source]
        axes.annotate(  # type: ignore[attr-defined]
            "",
            xy=places[target],
            xytext=places[source],
            arrowprops={
                "arrowstyle": "->",
                "color": "tab:red" if up else "0.6",
                "lw": 0.6 + min(count, 60) / 25,
                "shrinkA": 16,
                "shrinkB": 16,
                "connectionstyle": "arc3,rad=0.12",
                "zorder": 2 if up else 1,
            },
        )
    for name, (x, y) in places.items():
        files, _ = tree.lines(name + "/" if name == "megatron_patches" else f"distca/{name}/")
        if files:
            box = {"boxstyle": "round", "facecolor": "white", "edgecolor": "0.3"}
            axes.text(x, y, f"{name}\n{files} files", ha="center", va="center", fontsize=8, bbox=box, zorder=3)  # type: ignore[attr-defined]


def main() -> None:
    old, new = Tree.of(sys.argv[1]), Tree.of("HEAD")
    figure = Figure(figsize=(12, 7), layout="constrained")
    for axes, tree, title in zip(figure.subplots(1, 2), (old, new), ("before", "after"), strict=True):
        draw(axes, tree, title)
    figure.savefig(ROOT / "docs" / "images" / "structure.svg")
    folders = sorted({name for row in ROWS for name in row})
    print("| folder | files before | after | lines before | after |\n|---|---|---|---|---|")
    for name in folders:
        start = name + "/" if name == "megatron_patches" else f"distca/{name}/"
        (a, b), (c, d) = old.lines(start), new.lines(start)
        print(f"| {start} | {a} | {c} | {b:,} | {d:,} |")
    kinds = {
        "product": ("distca/", "megatron_patches/"),
        "tests": ("tests/",),
        "benchmarks": ("benchmarks/",),
        "examples": ("examples/",),
    }
    for kind, starts in kinds.items():
        (a, b), (c, d) = old.lines(*starts), new.lines(*starts)
        print(f"| {kind}, all | {a} | {c} | {b:,} | {d:,} |")
    (a, b), (c, d) = old.lines("", suffix=".sh"), new.lines("", suffix=".sh")
    print(f"| shell scripts | {a} | {c} | {b:,} | {d:,} |")


if __name__ == "__main__":
    main()
