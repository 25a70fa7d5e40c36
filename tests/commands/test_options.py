from pathlib import Path

import pytest

from distca.commands.options import check_most, check_writable
from distca.errors import OptionError


def test_the_first_option_above_the_limit_is_named() -> None:
    check_most(4, ranks=4, heads=None)
    with pytest.raises(OptionError, match="--ranks is 5; it must be at most 4"):
        check_most(4, heads=None, ranks=5)


def test_a_check_of_an_output_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("precious")
    check_writable("output", tmp_path / "there.json")
    check_writable("output", tmp_path / "new" / "table.json")
    assert (tmp_path / "there.json").read_text() == "precious"
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("output", ["/proc/x.json", "{}", "{}/file/x.json"])
def test_an_output_that_cannot_be_written_is_a_sentence(tmp_path: Path, output: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"--output is .*, which cannot be written \(.*\); give another file"):
        check_writable("output", output.format(tmp_path))


@pytest.mark.parametrize("command", ["profile", "parity"])
def test_an_output_is_checked_before_anything_is_measured(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from distca.commands.main import main
    from distca.profile import measure
    from distca.testing import ranks

    def late(*_: object, **__: object) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr(ranks, "run_ranks", late)
    monkeypatch.setattr(measure, "grid_for", late)
    with pytest.raises(SystemExit) as ended:
        main([command, "--output", "/proc/x.json"])
    assert ended.value.code == 2
    assert "--output is /proc/x.json, which cannot be written" in " ".join(capfd.readouterr().err.split())
