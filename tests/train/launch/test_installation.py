"""What is missing is installed beside pretrain_llama.sh first."""

import shutil
from pathlib import Path

import pytest

from distca.errors import LaunchError
from distca.train.launch import installation
from tests.train.launch.machine import ROOT, Machine


def test_missing_dependencies_are_installed_beside_the_script(machine: Machine) -> None:
    """A copy of the project, a Python without dependencies, and a stand-in for it that records pip's calls."""
    project = machine.folder / "project"
    (project / "configs").mkdir(parents=True)
    for name in ("pretrain_llama.sh", "pyproject.toml", "configs/tiny.yaml"):
        shutil.copy(ROOT / name, project / name)
    for name in ("scripts", "distca"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    calls = machine.folder / "calls"
    bare = f"""#!/bin/bash
{machine._launch}
if [[ $1 == - ]]; then exit 1; fi
if [[ $1 == -c ]]; then exit 0; fi
echo "$@" >> {calls}
if [[ $2 == venv ]]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi
if [[ $* == *"$FAIL"* && -n $FAIL ]]; then echo no such package; exit 1; fi
"""
    for name in ("python", "python3.11", "python3.12"):
        machine.tool(name, bare)
    dry = machine.run(script=project / "pretrain_llama.sh", DRY_RUN="1", STEPS="5")  # a mistake that is not seen
    assert dry.returncode == 0, dry.stderr
    assert "dependencies are missing" in dry.stderr and "--train.steps 5" in dry.stdout
    assert not calls.exists()
    assert not (project / ".venv").exists()
    result = machine.run(script=project / "pretrain_llama.sh")
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[0].startswith("DistCA's dependencies are missing: installing them into")
    made, torch, rest, checked, started = calls.read_text().splitlines()
    assert made == f"-m venv {project}/.venv"
    assert torch.endswith("torch==2.13.0"), "torch comes first and by itself where there is no GPU"
    assert rest.endswith(f"-e {project}")
    assert checked.startswith(f"{project}/pretrain_llama.py --check 4 ")
    assert started.startswith("-m distca.cluster.torchrun --nproc-per-node=4")
    # With a GPU it is one step, and a failure says where to look.
    machine.gpus(1)
    failed = machine.run(script=project / "pretrain_llama.sh", FAIL="[gpu]", MODEL="tiny")
    assert failed.returncode == 2
    assert calls.read_text().splitlines()[-1].endswith(f"-e {project}[gpu]")
    assert "no such package" in failed.stderr
    assert "setup.log" in failed.stderr


def test_a_project_that_cannot_be_written_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "ROOT", tmp_path / "gone")
    monkeypatch.setattr(installation, "_base_python", lambda: "python3.12")
    with pytest.raises(LaunchError, match=r"setup\.log cannot be written \(No such file or directory\)\.") as caught:
        installation.install(gpus=False)
    assert "activate an environment" in caught.value.next_step
