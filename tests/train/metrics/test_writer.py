import errno
import json
import math
import os
import sys
from io import FileIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from distca.errors import ConfigError, VersionError
from distca.train.metrics.writer import MetricsWriter, check_wandb, read_metrics


def test_every_line_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for step in (1, 2):
        writer.log(step, {"loss": 4.0 / step, "mfu": None})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1]) == {"step": step, "loss": 4.0 / step}
    writer.close()


def test_resume_drops_the_steps_that_come_again_and_a_torn_line(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(1, 6):
            writer.log(step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=4) as writer:
        writer.log(4, {"loss": 0.5})
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 0.5)]


def test_a_disk_without_room_for_the_lines_of_a_resumed_run_is_a_sentence(tmp_path: Path) -> None:
    MetricsWriter(tmp_path, tensorboard=False).close()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "metrics.jsonl.new").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=f"metrics of {tmp_path} cannot be written .*No space left on device"):
        MetricsWriter(tmp_path, tensorboard=False, resume_step=2)
    assert read_metrics(tmp_path) == [{"step": 1}]


def test_what_a_power_failure_left_of_lines_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n\0\0\0\n{"step": 2}\n\xff\n[]\n3\n')
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=3):
        assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_a_new_run_does_not_write_over_an_old_one(tmp_path: Path) -> None:
    MetricsWriter(tmp_path, tensorboard=False).close()
    with pytest.raises(FileExistsError):
        MetricsWriter(tmp_path, tensorboard=False)


def test_values_that_json_lacks_come_back(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.log(1, {"loss": math.nan, "grad_norm": math.inf, "note": "x", "attention_s": [1.0, math.inf]})
    raw = (tmp_path / "metrics.jsonl").read_text()
    json.loads(raw, parse_constant=pytest.fail)
    (line,) = read_metrics(tmp_path)
    assert math.isnan(line["loss"])
    assert line["grad_norm"] == math.inf
    assert line["note"] == "x" and line["attention_s"] == [1.0, math.inf]


def test_tensorboard_has_the_same_figures_and_hides_dropped_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        for step in (1, 2, 3):
            writer.log(step, {"loss": float(step)})
    with MetricsWriter(tmp_path, tensorboard=True, resume_step=3) as writer:
        writer.log(3, {"loss": 9.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 9.0)]


def test_a_disk_that_is_full_for_a_while_is_one_warning_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.log(1, {"loss": 1.0})
        full = Disk(room=10)  # takes a part of a line
        for file in (writer._file, writer._board):
            monkeypatch.setattr(file, "_file", full.shared_with(file._file))
        writer.log(2, {"loss": 2.0})
        writer.log(3, {"loss": 3.0})
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert f"Metrics cannot be written to {tmp_path} (No space left on device)" in caplog.text
        assert [line["step"] for line in read_metrics(tmp_path)] == [1]
        full.room = 10_000
        writer.log(4, {"loss": 4.0})
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == [(n, float(n)) for n in (1, 2, 3, 4)]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == [1.0, 2.0, 3.0, 4.0]
    assert len(caplog.records) == 1


def test_steps_that_are_not_written_at_the_end_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        monkeypatch.setattr(writer._file, "_file", Disk(room=0).shared_with(writer._file._file))
        writer.log(1, {"loss": 1.0})
        writer.log(2, {"loss": 2.0})
    assert caplog.messages[1:] == [f"{tmp_path}/metrics.jsonl lacks the last 2 steps."]


class Disk:
    """One of ``room`` bytes, for several files."""

    def __init__(self, room: int) -> None:
        self.room = room

    def shared_with(self, file: FileIO) -> SimpleNamespace:
        def write(content: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = file.write(content[: self.room])
            self.room -= written
            return written

        return SimpleNamespace(write=write, close=file.close)


def test_weights_and_biases_gets_the_same_and_a_resumed_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, object]] = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append(("log", (step, values))), finish=lambda: calls.append(("finish", None))
    )
    package = SimpleNamespace(
        init=lambda **options: calls.append(("init", options)) or run, util=SimpleNamespace(generate_id=lambda: "abc")
    )
    monkeypatch.setitem(sys.modules, "wandb", package)
    (tmp_path / "config.yaml").write_text("name: try")
    for resumed in (None, 2):
        with MetricsWriter(tmp_path, tensorboard=False, resume_step=resumed, wandb="ours") as writer:
            writer.log(resumed or 1, {"loss": 4.0, "mfu": None})
    names = [name for name, _ in calls]
    assert names == ["init", "log", "finish"] * 2
    for _, options in calls[::3]:
        assert options == {
            "project": "ours",
            "name": tmp_path.name,
            "id": "abc",
            "resume": "allow",
            "dir": str(tmp_path),
            "config": {"name": "try"},
        }
    assert calls[4][1] == (2, {"loss": 4.0})


def test_without_the_package_wandb_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(VersionError, match=r"log\.wandb needs the package wandb: pip install wandb"):
        check_wandb()
