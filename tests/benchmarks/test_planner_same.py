"""Plans on equal servers are the kept ones, whatever CPU plans them."""

import ast
from pathlib import Path

import pytest

import distca.plan
from benchmarks.planner_same import RESULTS, STEPS, figures_of, plans_of, together
from distca.json_file import read_object

PRODUCTS = {"dot", "matmul", "einsum", "tensordot", "inner", "vdot", "linalg"}


@pytest.mark.parametrize("first", [0, 180, 260])
def test_plans_are_the_kept_ones(first: int) -> None:
    """Of thirty steps, among them some that differed by CPU while the planner had matrix products."""
    kept = read_object(RESULTS)["by_ten_steps"][str(first)]
    found = figures_of(plans_of(first))
    assert found["fingerprint"] == kept["fingerprint"], "python -m benchmarks.planner_same says what differs"
    assert found == pytest.approx(kept)


def test_kept_figures_are_those_of_all_steps() -> None:
    kept = read_object(RESULTS)
    assert [int(first) for first in kept["by_ten_steps"]] == list(range(0, STEPS, 10))
    assert kept["together"] == pytest.approx(together(list(kept["by_ten_steps"].values())))


def products_in(text: str) -> list[int]:
    """Lines with a matrix product."""
    nodes = ast.walk(ast.parse(text))
    return [
        node.lineno
        for node in nodes
        if (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult))
        or (isinstance(node, ast.Attribute) and node.attr in PRODUCTS)
    ]


def test_the_planner_has_no_matrix_products() -> None:
    """Libraries round them as the CPU's kind has it, and every rank has to make the same plan."""
    assert products_in("a = b @ c\nd = np.einsum('i,i', a, a)\ne = a * b") == [1, 2]
    files = sorted(Path(distca.plan.__file__).parent.rglob("*.py"))
    assert len(files) > 30
    assert {path.name: lines for path in files if (lines := products_in(path.read_text(encoding="utf-8")))} == {}
