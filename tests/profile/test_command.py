import json
import os
import signal
from importlib.metadata import version

import numpy as np
import pytest
import torch

from distca.commands.main import main
from distca.errors import PlanError
from distca.plan import load_table
from distca.plan.cost.table_file import find_table, open_table, table_name
from distca.profile import measure
from tests.profile.machine import TINY

SMALL = ["--heads", "2", "--kv_heads", "1", "--head_dim", "8", "--hidden", "16", "--ffn", "32"]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU rehearsal")


def test_profile_writes_a_table_with_links(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "grid_for", lambda device, shape: TINY)
    main(["profile", "--ranks", "2", *SMALL])
    path = tmp_path / table_name("cpu", "reference", 2, 1, 8)
    content = json.loads(path.read_text())
    assert [pair["ranks"] for pair in content["links"]["pairs"]] == [[0, 1]]
    assert content["versions"]["torch"] == version("torch")
    assert load_table(path).backward(np.array(64), np.array(512)) > 0


def test_a_table_of_narrow_values_is_found_by_both_sizes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "grid_for", lambda device, shape: TINY)
    main(["profile", "--ranks", "1", *SMALL, "--kv_heads", "2", "--value_dim", "6"])
    path = tmp_path / "cpu_reference_2x2x8-6.json"
    assert json.loads(path.read_text())["value_dim"] == 6
    assert find_table("cpu", "reference", 2, 2, 8, folder=tmp_path) is None
    cost = find_table("cpu", "reference", 4, 4, 8, value_dim=6, folder=tmp_path)
    assert cost is not None and cost.shape.value_dim == 6 and cost.backward(np.array(64), np.array(512)) > 0
    assert open_table(path, 2, 2, 8, 6).shape == load_table(path).shape
    with pytest.raises(PlanError, match="head size 8 with values of 6, but a rank of this model has 2, 2 and 8;"):
        open_table(path, 2, 2, 8)


def test_an_ended_measurement_keeps_what_it_has_and_shows_lines_where_there_is_no_terminal(
    tmp_path, monkeypatch, capfd
):
    time_mixed = measure.time_mixed

    def told_to_end(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return time_mixed(*args)

    monkeypatch.setattr(measure, "grid_for", lambda device, shape: TINY)
    monkeypatch.setattr(measure, "time_mixed", told_to_end)
    before, path = signal.getsignal(signal.SIGTERM), tmp_path / "table.json"
    with pytest.raises(SystemExit) as ended:
        main(["profile", *SMALL, "--output", str(path)])
    assert ended.value.code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) is before
    said = " ".join(capfd.readouterr().err.split())
    assert said.count("reference kernel: ") == 10 and "Ended early: it lacks mixed batches, linear layers." in said
    assert json.loads(path.read_text())["lacks"] == ["mixed batches", "linear layers"]
    assert load_table(path).backward(np.array(64), np.array(512)) > 0


def test_impossible_heads_are_one_sentence(capfd):
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--heads", "3", "--kv_heads", "2"])
    assert ended.value.code == 2
    assert "heads must be a positive multiple of kv_heads" in " ".join(capfd.readouterr().err.split())


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    from distca.commands import profile as command

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(command, "choose_kernel", lambda *args, **kwargs: None)
    with pytest.raises(PlanError, match="2 GPUs"):
        command.profile(ranks=3)


def test_a_table_that_a_full_disk_does_not_take_is_a_sentence(monkeypatch, capfd):
    from distca.commands import profile as command

    measured = {"device": "cpu", "kernel": "reference", "validation": None, "linear": None}
    monkeypatch.setattr(command, "measure_device", lambda *args, **kwargs: measured)
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--head_dim", "32", "--output", "/dev/full"])
    assert ended.value.code == 2
    assert "--output is /dev/full, which cannot be written (No space left on device)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("head_dim", "7", "--head_dim is 7, but rotary positions need an even one"),
        ("value_dim", "200", "--value_dim is 200; it must be at most 128"),
        ("ranks", "0", "--ranks is 0; it must be at least 1"),
        ("ranks", "65", "--ranks is 65; it must be at most 64"),
        ("kernel", "foo", "--kernel must be one of auto, flash4"),
    ],
)
def test_options_that_measure_nothing_are_one_sentence(capfd, option, value, said):
    with pytest.raises(SystemExit) as ended:
        main(["profile", f"--{option}", value])
    assert ended.value.code == 2
    assert said in " ".join(capfd.readouterr().err.split())


def test_a_kernel_that_cannot_run_here_is_named_as_the_option(capfd):
    with pytest.raises(SystemExit):
        main(["profile", "--kernel", "flash4"])
    said = " ".join(capfd.readouterr().err.split())
    assert "--kernel flash4 cannot run here" in said and "cad.kernel" not in said
