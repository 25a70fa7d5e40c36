"""``distca checkpoint``, on folders that look like a run's."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from distca.commands.main import main
from distca.train.checkpoint.command import _checkpoint_of
from distca.train.run.folder_choice import hold
from distca.train.run.run_folder import Checkpoint, RunFolder, newest_intact


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    for step in (10, 20, 30, 40):
        folder.checkpoint_path(step).mkdir(parents=True)
        (folder.checkpoint_path(step) / "weights").write_bytes(b"12345")
        if step != 40:
            folder.mark_complete(step)
    return folder


def _refused(capsys: pytest.CaptureFixture[str], *line: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", *map(str, line)])
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_verify_reads_every_file(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    main(["checkpoint", "verify", str(run.path)])
    assert capsys.readouterr().out.count("is what was saved") == 3
    (run.checkpoint_path(20) / "weights").write_bytes(b"12355")
    assert "1 of 3 checkpoints of" in _refused(capsys, "verify", run.path)
    main(["checkpoint", "verify", str(run.checkpoint_path(30))])
    said = capsys.readouterr().out
    assert said.count("is what was saved") == 1 and "step_000030" in said
    assert "cannot be used" in _refused(capsys, "verify", run.checkpoint_path(20))
    main(["checkpoint", "prune", str(run.path), "--keep", "1"])
    assert [path.name for path in run.checkpoint_folders()] == ["step_000030"]


def test_the_next_step_after_damage_goes_by_what_is_intact(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    go_on = "next step: delete the folders that are named as damaged; a run that resumes takes the newest intact"
    for step in (20, 30):
        (run.checkpoint_path(step) / "weights").write_bytes(b"12355")
        assert go_on in _refused(capsys, "verify", run.path)
        assert go_on in _refused(capsys, "verify", run.checkpoint_path(step))
    (run.checkpoint_path(10) / "weights").write_bytes(b"12355")
    assert "next step: resume an older run, or start anew." in _refused(capsys, "verify", run.path)
    assert "next step: resume an older run, or start anew." in _refused(capsys, "verify", run.checkpoint_path(20))
    alone = run.checkpoint_path(20).rename(run.path.parent / "alone")
    assert "next step: resume an older run, or start anew." in _refused(capsys, "verify", alone)


def test_a_checkpoint_that_was_mended_counts_again(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    weights = run.checkpoint_path(30) / "weights"
    weights.write_bytes(b"12355")
    assert "1 of 3 checkpoints of" in _refused(capsys, "verify", run.path)
    assert newest_intact(run) == Checkpoint(20, run.checkpoint_path(20))
    weights.write_bytes(b"12345")
    main(["checkpoint", "verify", str(run.path)])
    assert newest_intact(run) == Checkpoint(30, run.checkpoint_path(30))
    mark = run.checkpoint_path(20) / "DAMAGED"
    mark.mkdir()  # which no unlink deletes
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["checkpoint", "verify", str(run.path)])
    said = " ".join(capsys.readouterr().out.split())
    assert f"is what was saved, but {mark} cannot be deleted (" in said and said.count("is what was saved: ") == 2


def test_list_shows_the_state_of_each(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    (run.checkpoint_path(10) / "weights").write_bytes(b"1")
    main(["checkpoint", "list", str(run.path)])
    shown = re.findall(r"│ +(\d+) │.*│ *([a-z ]+?) *│", capsys.readouterr().out)
    assert shown == [("10", "damaged"), ("20", "complete"), ("30", "complete"), ("40", "not finished")]


def test_prune_keeps_the_newest_and_touches_no_run_that_is_written(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with hold(run):
        assert "is being written by process" in _refused(capsys, "prune", run.path)
    assert "--keep is 0; it must be at least 1." in _refused(capsys, "prune", run.path, "--keep", 0)
    main(["checkpoint", "prune", str(run.path)])
    assert [path.name for path in run.checkpoint_folders()] == ["step_000020", "step_000030"]
    assert "2 checkpoints deleted," in capsys.readouterr().out


def test_prune_fails_where_a_checkpoint_cannot_be_deleted(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = os.unlink

    def refuse(path: str | Path, **where: int) -> None:
        if "step_000010" in os.fspath(path):
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, **where)

    monkeypatch.setattr(os, "unlink", refuse)
    said = _refused(capsys, "prune", run.path)
    assert f"1 checkpoint of {run.path} cannot be deleted: step_000010." in said
    assert [path.name for path in run.checkpoint_folders()] == ["step_000010", "step_000020", "step_000030"]


def test_a_damaged_checkpoint_never_costs_an_intact_one(run: RunFolder) -> None:
    (run.checkpoint_path(30) / "weights").write_bytes(b"1")
    main(["checkpoint", "prune", str(run.path), "--keep", "1"])
    assert [path.name for path in run.checkpoint_folders()] == ["step_000020", "step_000030"]
    (run.checkpoint_path(20) / "weights").unlink()
    main(["checkpoint", "prune", str(run.path), "--keep", "1"])
    assert len(run.checkpoint_folders()) == 2


def test_a_folder_without_checkpoints_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("verify", "list", "prune"):
        assert "which holds no checkpoints; give the folder of a run" in _refused(capsys, command, tmp_path)


def test_an_export_has_the_settings_that_its_checkpoint_was_saved_with(run: RunFolder) -> None:
    later = run.resumed_config(20)
    later.write_text("{}")
    assert _checkpoint_of(run.path, None) == (run.checkpoint_path(30), later)
    assert _checkpoint_of(run.path, 20) == (run.checkpoint_path(20), run.config)


def test_a_folder_that_is_no_runs_is_no_wrong_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = _refused(capsys, "export", tmp_path, "--output", tmp_path / "new")
    assert "has no complete checkpoint" in said and "next step: change the option that is named" in said


def test_a_mark_of_damage_counts_whatever_is_in_it(run: RunFolder) -> None:
    (run.checkpoint_path(30) / "DAMAGED").write_bytes(b"\xff")
    assert newest_intact(run) == Checkpoint(20, run.checkpoint_path(20))
