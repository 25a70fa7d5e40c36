"""Two GPUs as two nodes over sockets: what a command line asks for, and the prediction of it."""

import json

import pytest

from benchmarks.calibration_runs import RESULTS
from benchmarks.two_nodes import _MOVED, _runs, _settings
from distca.errors import ConfigError, LaunchError

ARGUMENTS = ["--output", "logs", "--modes", "distca", "packed-dealt", "--mixes", "pretrain", "--contexts", "128"]
ARGUMENTS += ["--", "--data.context_length", "128", "--data.tokens_per_rank", "128", "--model.vocabulary", "64"]


def test_runs_of_several_numbers_of_micro_batches_take_every_rank_for_a_node() -> None:
    every = _settings(["--runs", "4x2", "1x3", *ARGUMENTS], 2)
    assert list(every) == ["4x2", "1x3"]
    for name, settings in every.items():
        assert settings.slow_links and settings.socket_nodes == 1 and settings.short_warm_up
        assert f"{settings.config.train.micro_batches}x{settings.batches}" == name == settings.output.name
        assert settings.config.cad.ranks_per_node == 1
    for wrong in (["--output", "logs"], ["--runs", "--output"], ["--runs", "0x3"], ["--runs", "4"]):
        with pytest.raises(ConfigError, match="4x2 1x3"):
            _runs(wrong)


def test_settings_that_do_nothing_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"what is given by cad.enabled, train.steps\."):
        _settings(["--runs", "1x1", "--output", "x", "--", "--cad.enabled", "false", "--train.steps", "3"], 2)


def test_bytes_of_a_checkout_are_those_of_its_planner(capsys: pytest.CaptureFixture[str]) -> None:
    import io
    import json
    import sys
    from unittest import mock

    given = {"ranks": 2, "nano_batches": 2, "heads": [2, 2, 8], "lengths": [[1000], [500, 500]]}
    with mock.patch.object(sys, "stdin", io.StringIO(json.dumps(given))):
        exec(_MOVED, {})
    # One document over two ranks has to move something, two of one rank each nothing.
    assert int(capsys.readouterr().out) > 0


def test_layers_with_windows_are_predicted_by_their_own_tables() -> None:
    """Measured on two H100; as full ones, these layers would be predicted 13 to 56 % slower."""
    from benchmarks.two_nodes import compared

    content = json.loads((RESULTS / "kinds_gpt_oss_like_2_gpus.json").read_text())
    for modes in compared(content, None).values():
        for name, row in modes.items():
            assert row["tokens_per_s_predicted"] == pytest.approx(row["tokens_per_s"], rel=0.05), name


def test_modes_of_unmodified_megatron_are_named_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    from benchmarks.two_nodes import compared

    figures = {"tokens_per_s": 1.0}
    modes = {"megatron-te": figures, "megatron-te2-p2p": figures}
    content = json.loads((RESULTS / "throughput_2_gpus_pretrain_256k.json").read_text())
    for cell in content["cells"].values():
        cell["modes"] = modes
    assert compared(content, None) == {}
    assert "megatron-te, megatron-te2-p2p are left out here" in caplog.text
