"""A user's mistakes: one sentence each, before anything starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distca.testing.ranks import run_ranks
from tests.testing import programs
from tests.train.small_runs import ROOT, arguments, train_all, write_texts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With texts, and a run that has ended."""
    path = tmp_path_factory.mktemp("mistakes")
    write_texts(path / "texts")
    (path / "nothing").mkdir()
    (path / "ones").mkdir()
    for name in "abcdefghij":
        (path / "ones" / name).with_suffix(".txt").write_text(name)
    write_texts(path / "mostly-ones", [9] + [1] * 30)
    line = arguments(name="ended", output=path, data__path=path / "texts", checkpoint__save_every=2)
    slow = {"train__steps": 60, "train__time_limit": 1e-3, "optimizer__warmup_steps": None}
    run_ranks(2, train_all, [line, arguments(name="warm", output=path, data__path=path / "texts", **slow)])
    return path


def check(ranks: int, *line: str) -> subprocess.CompletedProcess[str]:
    return programs.run("pretrain_llama.py", "--check", str(ranks), *line)


MISTAKES = {
    "missing folder": (2, {"data__path": "{folder}/nowhere"}, "nowhere"),
    "empty folder": (2, {"data__path": "{folder}/nothing"}, "nothing"),
    "no path": (2, {"data__path": None}, "data.source text needs data.path."),
    "document longer than the context": (
        2,
        {"data__context_length": 90, "data__longer": "error"},
        "set data.longer to split",
    ),
    "document longer than a micro-batch": (
        2,
        {"data__tokens_per_rank": 40},
        "data.context_length is 96, but a micro-batch holds 80 tokens",
    ),
    "heads": (6, {"parallel__tp": 3}, "model.heads 4 is not divisible by parallel.tp 3"),
    "too few ranks": (1, {"parallel__tp": 2}, "The run has 1 rank, but parallel.tp 2 needs at least 2"),
    "odd ranks": (3, {"parallel__tp": 2}, "The 3 ranks are not divisible by parallel.tp 2"),
    "unknown setting": (2, {"model__depth": 3}, "There is no setting 'model.depth'"),
    "word for a number": (2, {"train__steps": "many"}, "train.steps must be a whole number, not many"),
    "nothing left": (2, {"checkpoint__resume": "{folder}/ended"}, "nothing is left to do. Raise train.steps."),
    "a warm-up that does not end": (
        2,
        {"checkpoint__resume": "{folder}/warm", "train__steps": 6, "optimizer__warmup_steps": "null"},
        "but train.steps is 6; the warm-up must end before the run does: lower the first, or leave it out, or raise "
        "the second. The warm-up is that of the resumed run; optimizer.warmup_steps sets another.",
    ),
    "another model": (
        2,
        {"checkpoint__resume": "{folder}/ended", "model__layers": 3, "train__steps": 9},
        "does not fit this run: model.layers was 2, now 3.",
    ),
    "one token for validation": (
        1,
        {"data__path": "{folder}/mostly-ones", "data__validation_fraction": 0.01},
        "No document for validation has more than one token (1 document); raise data.validation_fraction, or",
    ),
    "documents of one token": (1, {"data__path": "{folder}/ones"}, "No document has more than one token"),
    "no checkpoint": (2, {"checkpoint__resume": "{folder}/texts"}, "which has no complete checkpoint"),
    "nothing to evaluate": (
        2,
        {"checkpoint__resume": "auto", "train__evaluate": True, "name": "none", "output": "{folder}"},
        "none has a complete checkpoint; check name and output.",
    ),
    "other documents": (
        2,
        {"checkpoint__resume": "{folder}/ended", "train__steps": 9, "data__seed": 5},
        "or start a new run. data.seed was 1234, now 5.",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_before_anything_starts(folder: Path, mistake: str) -> None:
    ranks, settings, said = MISTAKES[mistake]
    settings = {"data__path": "{folder}/texts", "output": "{folder}/mistakes"} | settings
    filled = {name: str(value).format(folder=folder) for name, value in settings.items() if value is not None}
    done = check(ranks, *arguments(**{"data__path": None} | filled))
    _is_one_sentence(done, said)
    assert not (folder / "mistakes").exists()


def test_a_run_with_damaged_checkpoints_is_refused_before_anything_starts(
    folder: Path,
) -> None:
    shutil.copytree(folder / "ended", folder / "damaged")
    for checkpoint in (folder / "damaged" / "checkpoints").iterdir():
        os.truncate(checkpoint / "__0_0.distcp", 100)
    done = check(2, *arguments(data__path=folder / "texts", train__steps=9, checkpoint__resume=folder / "damaged"))
    assert done.returncode == 2 and "are damaged, as the lines above say" in done.stderr
    assert "step_000006 is damaged: __0_0.distcp has 100 bytes, not" in done.stderr


def test_a_good_run_is_accepted_without_torch(folder: Path) -> None:
    """By a process that has imported nothing before."""
    line = arguments(data__path=folder / "texts", output=folder / "mistakes")
    code = "import sys; from distca.train.run.main import main; main(); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "--check", "2", *line]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not (folder / "mistakes").exists()


def test_a_mistake_ends_all_ranks_of_a_started_run(folder: Path) -> None:
    line = arguments(data__path=folder / "texts", output=folder / "mistakes", model__heads=5)
    done = programs.run("pretrain_llama.py", *line)
    _is_one_sentence(done, "model.hidden 32 is not divisible by model.heads 5")
    line = arguments(data__path=folder / "nowhere", output=folder / "mistakes")
    started = programs.torchrun(2, "pretrain_llama.py", *line)
    assert started.returncode != 0
    sentences = [line for line in started.stderr.splitlines() if "nowhere" in line and "Traceback" not in line]
    assert sentences, started.stderr
    assert 'pretrain_llama.py", line' not in started.stderr, "a traceback of ours"
    assert not (folder / "mistakes").exists()


def _is_one_sentence(done: subprocess.CompletedProcess[str], said: str) -> None:
    assert done.returncode == 2, done.stderr
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if "rror" in line]) == 1, done.stderr
