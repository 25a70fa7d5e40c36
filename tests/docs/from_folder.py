"""The README's run from a Hugging Face folder to a Hugging Face folder, made for real on CPU ranks with a tiny one. The
suite leaves it out, for its time; CI runs it: python -m pytest tests/docs/from_folder.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import family_models
from tests.docs.pages import ROOT
from tests.docs.test_commands import Project
from tests.models.tokenizer import write_tokenizer


def test_from_a_folder_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = re.findall(r"^INIT_FROM=.*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    project = Project.copied(tmp_path)
    (named,) = re.findall(r"INIT_FROM=(\S+)", line)
    monkeypatch.setitem(family_models.SIZES, "vocab_size", 259)
    family_models.write_folder("llama3", project.folder / named)
    write_tokenizer(project.folder / named)
    texts = [json.dumps({"text": "the attention of long documents is moved to idle ranks. " * n}) for n in range(1, 40)]
    (project.folder / "corpus.jsonl").write_text("\n".join(texts))
    small = {"STEPS": "3", "CONTEXT_LENGTH": "256", "TOKENS_PER_RANK": "128", "GPUS_PER_NODE": "0"}
    project.run(f"{line} --log.tensorboard false", **small)
    before, after = (
        family_models.loaded(project.folder / where)
        for where in (named, re.findall(r"--checkpoint.export (\S+)", line)[0])
    )
    assert before.config.vocab_size == after.config.vocab_size == 259
    assert any(not old.equal(new) for old, new in zip(before.parameters(), after.parameters(), strict=True))
    assert len(list((project.folder / "runs" / "tokens").glob("*/tokens.idx"))) == 1
    assert len((project.folder / "runs" / "from-folder-tiny" / "metrics.jsonl").read_text().splitlines()) == 3
