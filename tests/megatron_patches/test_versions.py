"""Which megatron-core is found, and which are refused."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from distca.commands.main import main as command
from distca.errors import VersionError
from distca.train.run.main import main as train
from megatron_patches import versions


def _sources(folder: Path, version: tuple[int, int, int]) -> Path:
    """A folder with a megatron-core that cannot be imported."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise RuntimeError('imported')\n")
    major, minor, patch = version
    (core / "package_info.py").write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n")
    return folder


def _said(monkeypatch: pytest.MonkeyPatch, version: str | None) -> str | None:
    monkeypatch.setattr(versions, "installed_version", lambda: version)
    return versions.why_not_supported()


def test_the_installed_version_is_supported() -> None:
    assert versions.installed_version() == metadata.version("megatron-core")
    assert versions.why_not_supported() is None
    versions.check_version()


def test_sources_ahead_on_the_path_are_what_is_found_and_neither_they_nor_torch_are_imported(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(_sources(tmp_path, (0, 20, 3)))!r}); "
        "from megatron_patches.versions import installed_version; print(installed_version(), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "0.20.3 False\n", result.stderr


@pytest.mark.parametrize("version", ["0.16.1", "0.16.2", "0.17.0", "0.19.2"])
def test_versions_within_the_range(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    assert _said(monkeypatch, version) is None


@pytest.mark.parametrize("version", ["0.15.9", "0.16.0", "0.20.0", "1.0.0"])
def test_versions_outside_of_the_range(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    assert _said(monkeypatch, version) == f"{version}; versions >=0.16.1,<0.20 are supported"
    with pytest.raises(VersionError, match=version):
        versions.check_version()


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _said(monkeypatch, None) == "not installed; versions >=0.16.1,<0.20 are supported"


@pytest.mark.parametrize("line", [["--check", "1"], []])
def test_no_run_starts_with_another_version(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], line: list[str]
) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: "0.21.0")
    with pytest.raises(SystemExit) as ended:
        train([*line, "--data.source", "stdlib"])
    assert ended.value.code == 2
    shown = capfd.readouterr().err
    assert (
        "error: megatron-core is 0.21.0; versions >=0.16.1,<0.20 are supported.\nnext step: install such a version"
        in shown
    )
    assert "Traceback" not in shown


def test_doctor_names_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for version, said in (("0.19.2", "0.19.2"), ("0.21.0", "0.21.0; versions >=0.16.1,<0.20 are")):
        monkeypatch.setattr(versions, "installed_version", lambda version=version: version)
        command(["doctor"])
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│ megatron-core")]
        assert said in line
