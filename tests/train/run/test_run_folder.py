import dataclasses
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from distca.data import Sampler
from distca.errors import ConfigError
from distca.train.checkpoint.checkpoints import _identity, changes_since, check_fits, with_saved_warmup
from distca.train.checkpoint.integrity import check_contents, check_undamaged
from distca.train.config.cli import parse_run_config
from distca.train.config.schema import CheckpointConfig, OptimizerConfig, RunConfig
from distca.train.run.folder_choice import create_run_folder, hold, resume_run_folder
from distca.train.run.run_folder import RunFolder


def config_in(folder: Path, resume: str | None = None) -> RunConfig:
    return RunConfig(name="try", output=str(folder / "runs"), checkpoint=CheckpointConfig(resume=resume))


def save(folder: RunFolder, step: int, complete: bool = True) -> None:
    folder.checkpoint_path(step).mkdir(parents=True)
    (folder.checkpoint_path(step) / "weights").write_bytes(b"12345")
    if complete:
        folder.mark_complete(step)


def _resumed_step(config: RunConfig) -> int:
    found = resume_run_folder(config)
    assert found is not None
    return found[1].step


def test_a_second_run_of_a_name_gets_a_number(tmp_path: Path) -> None:
    paths = [create_run_folder(config_in(tmp_path)).path.name for _ in range(3)]
    assert paths == ["try", "try-2", "try-3"]


def test_config_yaml_starts_the_same_run(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    folder = create_run_folder(config)
    assert parse_run_config(["--config", str(folder.config)]) == config


def test_checkpoints_are_found_in_order_and_unfinished_ones_are_not(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.checkpoints() == []
    for step in (20, 1_000_000, 100):
        save(folder, step)
    save(folder, 2_000_000, complete=False)
    assert [checkpoint.step for checkpoint in folder.checkpoints()] == [20, 100, 1_000_000]
    assert folder.checkpoint_path(60).name == "step_000060"


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (10, 20, 30):
        save(folder, step)
    assert folder.prune(2) == []
    assert [checkpoint.step for checkpoint in folder.checkpoints()] == [20, 30]
    assert not folder.checkpoint_path(10).exists()
    assert folder.prune(5) == []


def test_resume_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    folder = create_run_folder(config_in(tmp_path))
    save(folder, 10)
    save(folder, 20)
    before = sorted(folder.path.iterdir()), folder.config.read_text()
    config = dataclasses.replace(config_in(tmp_path, str(folder.path)))
    found, checkpoint = resume_run_folder(config)
    assert (found, checkpoint.step) == (folder, 20)
    assert (sorted(folder.path.iterdir()), folder.config.read_text()) == before, "looking changes nothing"
    found.write_resumed_config(config, checkpoint.step)
    assert folder.config.read_text() == before[1]
    assert parse_run_config(["--config", str(folder.path / "config-from-step-000020.yaml")]) == config


@pytest.mark.parametrize("name", ["try", "try[lr=1]"])
def test_latest_is_the_run_of_this_name_that_saved_last(tmp_path: Path, name: str) -> None:
    config, latest = (dataclasses.replace(config_in(tmp_path, resume), name=name) for resume in (None, "latest"))
    folders = [create_run_folder(config) for _ in range(12)]
    for age, (folder, complete) in enumerate([(folders[8], True), (folders[2], True), (folders[10], False)]):
        save(folder, 5, complete)
        if complete:
            os.utime(folder.checkpoint_path(5) / "COMPLETE", (1000 + age, 1000 + age))
    # Other runs: one whose name begins alike, and one that was named like a second run of this name.
    for other in (f"{name}-out", f"{name}-13"):
        save(create_run_folder(dataclasses.replace(config, name=other)), 99)
    found, _ = resume_run_folder(latest)
    assert found == folders[2]
    # A run that was given another name since.
    renamed = folders[2].path.rename(folders[2].path.with_name("renamed"))
    found, _ = resume_run_folder(dataclasses.replace(latest, name="renamed"))
    assert found.path == renamed


def test_auto_takes_what_this_job_saved_then_the_newest_of_the_name_then_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(resume: str, job: str) -> str | None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        run = resume_run_folder(config_in(tmp_path, resume))
        return None if run is None else run[0].path.name

    assert found("auto", "7") is None and found("job", "7") is None
    for age, job in enumerate(["7", "17", "8"]):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        folder = create_run_folder(config_in(tmp_path))
        with hold(folder):
            save(folder, 10)
        os.utime(folder.checkpoint_path(10) / "COMPLETE", (1000 + age, 1000 + age))
    assert found("auto", "7") == found("job", "7") == "try"
    assert found("auto", "17") == found("job", "17") == "try-2"
    assert (found("auto", "9"), found("job", "9")) == ("try-3", None)
    with hold(RunFolder(tmp_path / "runs" / "try"), trains=False):  # checkpoints are pruned while job 7 waits
        pass
    assert found("job", "7") == "try"
    monkeypatch.delenv("SLURM_JOB_ID")
    assert resume_run_folder(config_in(tmp_path, "job")) is None


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    folder = create_run_folder(config_in(tmp_path))
    for _ in range(2):  # and another one after it
        said = rf"try is being written by process {os.getpid()} on .*; wait until"
        with hold(folder), pytest.raises(ConfigError, match=said), hold(folder):
            pass


def test_prune_takes_what_a_killed_run_left_unfinished(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    save(folder, 24, complete=False)
    save(folder, 100)
    others = [folder.checkpoint_path(24).with_name(name) for name in ("step_000024.tar", "step_000024_hf", "step_7")]
    others[0].write_text("of a user")
    others[1].mkdir()
    others[2].symlink_to("nowhere")
    assert folder.prune(2) == []
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {"step_000100", *(path.name for path in others)}


def test_what_a_resumed_run_does_otherwise_is_said(tmp_path: Path) -> None:
    first = dataclasses.replace(config_in(tmp_path), optimizer=OptimizerConfig(lr=0.001))
    folder = create_run_folder(first)
    save(folder, 10)
    fits = {"sampler": {}, "tokens of a step at most": 3 * first.data.tokens_per_rank * first.train.micro_batches}
    (folder.checkpoint_path(10) / "fits.json").write_text(json.dumps(fits))
    (checkpoint,) = folder.checkpoints()
    assert changes_since(folder, checkpoint, first, 3) == []
    now = dataclasses.replace(first, optimizer=OptimizerConfig(lr=0.002), output="elsewhere")
    lr, tokens = changes_since(folder, checkpoint, now, 2)
    assert lr == "optimizer.lr was 0.001, now 0.002" and "tokens at most, now" in tokens
    # The part that did step 10 began after step 4 with other settings.
    folder.write_resumed_config(now, 4)
    (folder.path / "config-from-step-000006.bak.yaml").write_text("of a user")
    assert changes_since(folder, checkpoint, now, 3) == []
    # A checkpoint was lost, so that step 10 was done again in a part that began earlier.
    folder.write_resumed_config(first, 2)
    assert changes_since(folder, checkpoint, first, 3) == []
    assert (folder.path / "config-from-step-000006.bak.yaml").exists()


def test_resume_mistakes_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which is not a folder"):
        resume_run_folder(config_in(tmp_path, str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match=r"no run .* has a complete checkpoint"):
        resume_run_folder(config_in(tmp_path, "latest"))
    folder = create_run_folder(config_in(tmp_path))
    with pytest.raises(ConfigError, match="has no complete checkpoint"):
        resume_run_folder(config_in(tmp_path, str(folder.path)))


def test_the_run_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    folder = create_run_folder(config_in(tmp_path))
    save(folder, 10)
    with pytest.raises(ConfigError, match=rf"step_000010, a checkpoint; give the folder of its run, {folder.path}\."):
        resume_run_folder(config_in(tmp_path, str(folder.checkpoint_path(10))))


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = create_run_folder(config_in(tmp_path))
    save(folder, 10)
    save(folder, 20)
    config, newest = config_in(tmp_path, "latest"), folder.checkpoint_path(20)
    assert _resumed_step(config) == 20
    check_undamaged(newest)
    (newest / "weights").write_bytes(b"123")
    with pytest.raises(ConfigError, match=r"step_000020 is damaged: weights has 3 bytes, not 5. Delete this folder"):
        check_undamaged(newest)
    with caplog.at_level(logging.WARNING):
        assert _resumed_step(config) == 10, "the newest that is intact"
    assert "step_000020 is damaged: weights has 3 bytes, not 5" in caplog.text
    (newest / "weights").unlink()
    with pytest.raises(ConfigError, match="weights is missing"):
        check_undamaged(newest)
    for content in ("{", "", "{}", "[]", '{"weights": "5"}', "\xff"):  # "" where the power failed
        (newest / "COMPLETE").write_text(content, encoding="latin-1")
        with pytest.raises(ConfigError, match="COMPLETE cannot be read"):
            check_undamaged(newest)
    (folder.checkpoint_path(10) / "weights").unlink()
    with pytest.raises(ConfigError, match=r"All checkpoints of .* are damaged"):
        resume_run_folder(config)


def test_flipped_bits_are_found_by_who_reads_that_part(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    save(folder, 10)
    path = folder.checkpoint_path(10)
    (path / "more").write_bytes(b"1234567")
    folder.mark_complete(10)
    check_contents(path)
    (path / "weights").write_bytes(b"12355")
    check_undamaged(path)  # of the right size
    wrong = "step_000010 is damaged: weights is not what was saved, as its checksum"
    with pytest.raises(ConfigError, match=wrong):
        check_contents(path)
    with pytest.raises(ConfigError, match=wrong):
        check_undamaged(path)  # as that was seen now
    check_contents(path, 0, 2)  # the other file, which is larger
    with pytest.raises(ConfigError, match="weights is not"):
        check_contents(path, 1, 2)


def test_a_checkpoint_whose_checksum_was_wrong_is_not_kept_in_place_of_newer_ones(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (30, 40):
        save(folder, step)
    (folder.checkpoint_path(40) / "weights").write_bytes(b"12355")
    with pytest.raises(ConfigError, match="step_000040 is damaged"):
        check_contents(folder.checkpoint_path(40))
    save(folder, 35)  # by a run that went on from 30
    assert folder.prune(1) == []
    assert [checkpoint.step for checkpoint in folder.checkpoints()] == [35, 40]


def test_what_was_just_saved_is_kept_whatever_comes_after_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (30, 35, 40):
        save(folder, step)
    assert folder.prune(1, newest=35) == []
    assert [checkpoint.step for checkpoint in folder.checkpoints()] == [35, 40]


def test_a_checkpoint_of_an_early_version_has_sizes_only(tmp_path: Path) -> None:
    folder = create_run_folder(config_in(tmp_path))
    save(folder, 10)
    path = folder.checkpoint_path(10)
    (path / "COMPLETE").write_text('{"weights": 5}')
    check_undamaged(path)
    check_contents(path)
    (path / "weights").write_bytes(b"1")
    with pytest.raises(ConfigError, match="weights has 1 bytes, not 5"):
        check_undamaged(path)


def test_what_is_saved_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """COMPLETE must not be there, or be empty, after the power failed."""
    happened: list[str] = []
    sync, replace = os.fsync, Path.replace

    def note_sync(file: int) -> None:
        happened.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
        sync(file)

    def note_replace(path: Path, target: Path) -> Path:
        happened.append(f"-> {target.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    save(RunFolder(tmp_path), 10)
    assert happened == ["weights", "COMPLETE.unfinished", "-> COMPLETE", "step_000010", "checkpoints"]


@pytest.mark.parametrize(
    ("held", "said", "files", "steps"),
    [
        ("COMPLETE", "it stays as it was", ["COMPLETE", "more", "weights"], [10, 20, 30]),
        ("more", "what is left of it is no checkpoint any more", ["more"], [20, 30]),
    ],
)
def test_what_is_left_of_an_old_checkpoint_that_cannot_be_deleted_is_said(
    held: str,
    said: str,
    files: list[str],
    steps: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = RunFolder(tmp_path)
    for step in (10, 20, 30):
        save(folder, step, complete=False)
        (folder.checkpoint_path(step) / "more").touch()
        folder.mark_complete(step)
    unlink = os.unlink

    def refuse(path: str | Path, **where: int) -> None:
        if os.path.basename(path) == held:
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, **where)

    for _ in range(2):  # what is left is tried again, and said again
        caplog.clear()
        with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
            patch.setattr(os, "unlink", refuse)
            assert folder.prune(2) == [folder.checkpoint_path(10)]
        assert f"step_000010 cannot be deleted (Permission denied); {said}." in caplog.text
        assert sorted(os.listdir(folder.checkpoint_path(10))) == files
        assert [checkpoint.step for checkpoint in folder.checkpoints()] == steps
    folder.prune(2)
    assert not folder.checkpoint_path(10).exists()


def test_a_full_disk_at_the_start_is_a_sentence_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    folder = create_run_folder(config_in(tmp_path))
    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(ConfigError, match=r"nothing can be written into .* \(No space left on device\); make room"):
        create_run_folder(config_in(tmp_path))
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["try"]
    with pytest.raises(ConfigError, match=r"config-from-step-000010.yaml cannot be written \(No space left"):
        folder.write_resumed_config(config_in(tmp_path), 10)


def test_what_an_attempt_that_was_broken_off_left_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    folder = create_run_folder(config_in(tmp_path))
    save(folder, 10)
    left = folder.checkpoint_path(20)
    left.mkdir()
    for name in ("COMPLETE.unfinished", "weights-of-another-rank"):
        (left / name).write_text("{")
    assert folder.clear_checkpoint(20) == left
    assert not list(left.iterdir())
    (left / "weights").write_text("12345")
    folder.mark_complete(20)
    assert [each.step for each in folder.checkpoints()] == [10, 20]
    check_undamaged(left)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", "[" * 5000])
def test_unreadable_notes_on_what_a_checkpoint_fits_are_a_sentence(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "fits.json").write_text(content)
    with pytest.raises(ConfigError, match=r"is damaged: fits\.json"):
        check_fits(tmp_path, RunConfig(), 256, Sampler(np.array([3]), 1, 8, 1, seed=0))


@pytest.mark.parametrize("state", [[], {}, 3, None])
def test_a_place_in_the_data_that_cannot_be_is_a_sentence(tmp_path: Path, state: object) -> None:
    (tmp_path / "fits.json").write_text(json.dumps(_identity(RunConfig(), 256) | {"sampler": state}))
    with pytest.raises(ConfigError, match=r"is damaged: fits\.json does not say where the data stood"):
        check_fits(tmp_path, RunConfig(), 256, Sampler(np.array([3]), 1, 8, 1, seed=0))


def test_a_resumed_run_keeps_the_warm_up_also_for_more_steps(tmp_path: Path) -> None:
    more = parse_run_config(["--train.steps", "600"])
    for saved, kept in (({"optimizer.warmup_steps": 4}, 4), ({}, 100)):  # early versions did not save it
        (tmp_path / "fits.json").write_text(json.dumps({"sampler": {}} | saved))
        assert with_saved_warmup(more, tmp_path).resolved_warmup_steps == kept
        given = parse_run_config(["--train.steps", "600", "--optimizer.warmup_steps", "7"])
        assert with_saved_warmup(given, tmp_path) == given
