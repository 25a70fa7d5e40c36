"""The cases of GPU tests can be handed in, also by a machine without a GPU."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
from pathlib import Path

import pytest

from tests.gpu.starts import Asked, Starts

FOLDER = Path(__file__).parents[1] / "gpu"
FILES = [file.stem for file in sorted(FOLDER.glob("test_*.py")) if "starts.result" in file.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", FILES)
def test_cases_of_a_file(name: str, tmp_path: Path) -> None:
    sys.modules.pop(f"tests.gpu.{name}", None)  # half of it may be left, where pytest skipped the file
    try:
        module = importlib.import_module(f"tests.gpu.{name}")
    except pytest.skip.Exception as reason:
        pytest.skip(str(reason))
    cases = module.cases(tmp_path)
    Starts(tmp_path, tmp_path, name, cases, {each.partition(": ")[0] for each in cases})
    files = sorted(tmp_path.glob("*/*.case"), key=lambda file: int(file.stem))
    asked: list[Asked] = [pickle.loads(file.read_bytes()) for file in files]
    assert [each.name for each in asked] == [f"{name}: {case}" for case in cases]
    for each in asked:
        function, arguments = pickle.loads(each.call)
        inspect.signature(function).bind(*arguments)
        assert each.ranks in (1, 2, 4)
        assert each.needs == () or all(path.with_suffix(".case") in files for path in each.needs)
