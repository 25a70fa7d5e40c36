import shlex
import subprocess
import sys

import pytest

from distca.commands import main as module
from distca.commands.main import COMMANDS, components, main
from distca.errors import DistcaError
from tests.testing import programs


class OurError(DistcaError):
    pass


def ours(value: int = 1) -> None:
    """Fail as a user's mistake."""
    raise OurError(f"value is {value}; change it.")


def bug() -> None:
    """Fail as a bug."""
    raise ValueError("a bug")


def stopped() -> None:
    """End as by Ctrl-C."""
    raise KeyboardInterrupt


def test_doctor_runs_and_names_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    main(["doctor", "--head_dim", "64"])
    shown = " ".join(capsys.readouterr().out.split())
    assert torch.__version__ in shown
    assert "head_dim 64" in shown
    if not torch.cuda.is_available():
        assert "gloo (not nvshmem:" in shown and "not nccl:" in shown


def test_help_lists_the_commands() -> None:
    result = programs.run("-m", "distca.commands.main", "--help")
    assert result.returncode == 0
    assert [name for name in components(None) if name not in result.stdout] == []


def test_nothing_is_said_but_the_mistake() -> None:
    """Also by what is imported, in a process that has not imported it before."""
    result = subprocess.run([sys.executable, "-m", "distca.commands.main"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("error: distca needs a command"), result.stderr


def test_only_the_chosen_command_is_imported() -> None:
    code = (
        "import sys; from distca.commands.main import components; components('doctor'); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "False", result.stderr


def test_every_command_exists() -> None:
    found = components(None)
    for name, place in COMMANDS.items():
        assert name in found
        if isinstance(place, dict):
            assert set(found[name]) == {"_help", *place}
        functions = [found[name][command] for command in place] if isinstance(place, dict) else [found[name]]
        for function in functions:
            assert function.__doc__.splitlines()[0].endswith("."), f"{name}: help has the first line alone"


def test_mistakes_are_sentences_and_bugs_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "components", lambda chosen: {"ours": ours, "bug": bug, "stopped": stopped})
    with pytest.raises(SystemExit) as ended:
        main(["ours", "--value", "7"])
    assert ended.value.code == 2
    with pytest.raises(ValueError, match="a bug"):
        main(["bug"])
    with pytest.raises(SystemExit) as ended:
        main(["stopped"])
    assert ended.value.code == 130 and "Stopped by Ctrl-C." in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("plan pretrain --ranks two", "--ranks must be a whole number, not two."),
        ("plan pretrain --resend 1", "--resend must be true or false, not 1."),
        ("plan pretrain --ranks", "--ranks needs a whole number."),
        ("plan pretrain --rankz 3", "distca plan has no option --rankz. Did you mean --ranks?"),
        ("plan pretrain again", "distca plan has no place for again."),
        ("data describe texts", "distca data describe has no place for texts. Did you mean --path texts?"),
        ("data describe ''", "distca data describe has no place for ''."),
        ("plan", "distca plan needs lengths."),
        ("data convert", "distca data convert needs --output."),
        ("data describe --source web", "--source must be one of text, jsonl, parquet, arrow, blend, indexed, stdlib"),
        ("data describe", "--source text needs --path."),
        ("data convert --output x", "The document source 'text' needs a path; set --path."),
        ("data convert --output x --end_token '#'", "--end_token is '#', which YAML reads as null; choose"),
        ("data convert --output x --field=---", "--field is '---', which YAML reads as null; choose"),
        ("plan pretrain --nano_batches 3", "--nano_batches is 3; it must be at most 2."),
        ("data describe --source mix", "--source mix needs --path, one of pretrain, prolong, pretrain-long, prolong-"),
        ("data", "distca data needs a command: one of convert, describe, preview."),
        ("data look", "distca data has no command 'look'; choose one of convert, describe, preview."),
        ("look", "distca has no command 'look'; choose one of plan, data,"),
        ("parity --max_ranks 0", "--max_ranks is 0; it must be at least 1."),
        ("doctor --head_dim 0", "--head_dim is 0, but rotary positions need an even one."),
        ("doctor --head_dim 7", "--head_dim is 7, but rotary positions need an even one."),
    ],
)
def test_mistakes_on_the_command_line_are_sentences(capfd: pytest.CaptureFixture[str], line: str, said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(line))
    assert ended.value.code == 2
    shown = " ".join(capfd.readouterr().err.split())
    assert shown.startswith("error: ") and said in shown and "next step: " in shown
    assert "usage:" not in shown
