"""README's run from a Hugging Face folder to a Hugging Face folder, made for real on CPU ranks with a tiny one. The
suite leaves it out, for its time; CI runs it: python -m pytest tests/docs/from_folder.py."""

import re
from pathlib import Path

import pytest

from benchmarks import family_models
from tests.docs.pages import ROOT, text_of
from tests.docs.test_commands import Project


def test_from_a_folder_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(family_models.SIZES, "vocab_size", 259)
    project = Project(tmp_path)
    (line,) = re.findall(r"^INIT_FROM=(\S+)(.*--checkpoint\.export (\S+))", text_of(ROOT / "README.md"), re.MULTILINE)
    small = {"STEPS": "3", "CONTEXT_LENGTH": "256", "TOKENS_PER_RANK": "128", "GPUS_PER_NODE": "0"}
    project.run(f"INIT_FROM={line[0]}{line[1]} --log.tensorboard false", **small)
    before, after = (family_models.loaded(project.folder / where) for where in (line[0], line[2]))
    assert before.config.vocab_size == after.config.vocab_size == 259
    assert any(not old.equal(new) for old, new in zip(before.parameters(), after.parameters(), strict=True))
    assert len(list((project.folder / "runs" / "tokens").glob("*/tokens.idx"))) == 1
    (metrics,) = (project.folder / "runs").glob("*/metrics.jsonl")
    assert len(metrics.read_text().splitlines()) == 3
