"""A Python that has everything DistCA needs: the active one, the project's .venv, or what is installed into that.

``python -m distca.train.launch.installation dev`` does it with an extra of pyproject.toml, and prints that Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from distca.errors import LaunchError, system_words
from distca.train.launch.machines import gpus_here
from distca.train.launch.say import leave, say

ROOT = Path(__file__).parents[3]

# What is installed, by itself and first, on a machine without GPUs: the CPU build, where the package index has it,
# instead of gigabytes of CUDA libraries.
CPU_TORCH = "torch==2.13.0"
_MODULES = ["numpy", "yaml", "torch", "megatron.core", "psutil", "jsonargparse", "rich", "matplotlib", "tensorboard"]
_MODULES_OF_EXTRA = {
    "models": ["safetensors", "tokenizers"],
    "data": ["tokenizers", "pyarrow", "zstandard", "jinja2"],
    "dev": [
        *("pytest", "pytest_timeout", "xdist", "hypothesis", "ruff", "mypy", "scipy"),
        *("tokenizers", "safetensors", "pyarrow", "zstandard", "transformers", "wheel"),
        "material",  # of mkdocs-material, which brings mkdocs
    ],
}
_HAS_MODULES = """
import importlib.util as util, sys
sys.exit(not ((3, 11) <= sys.version_info < (3, 13) and all(map(util.find_spec, sys.argv[1:]))))
"""
_CAN_BE_BASE = "import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 13))"


def find_python(extras: str = "") -> str | None:
    """A Python with everything, and with the modules of extras, which commas divide; None where neither the active one
    nor .venv has it. It is used as it is."""
    modules = [*_MODULES, *(module for extra in extras.split(",") for module in _MODULES_OF_EXTRA.get(extra, []))]
    if _succeeds("python", "-", *modules, source=_HAS_MODULES):
        return "python"
    return _activate() if _succeeds(str(_venv_python()), "-", *modules, source=_HAS_MODULES) else None


def install(gpus: bool, extra: str = "") -> str:
    """Make .venv where there is none, install DistCA into it, and return its Python.

    Args:
        gpus: with what GPUs need.
        extra: an extra of pyproject.toml beside it.

    Raises:
        LaunchError: the project's folder cannot be written, there is no Python to make it from, or a step failed;
            setup.log has its output.
    """
    log, python = ROOT / "setup.log", str(_venv_python())
    base = None if os.access(python, os.X_OK) else _base_python()
    say(f"DistCA's dependencies are missing: installing them into {ROOT / '.venv'}, once (output in {log}).")
    try:
        log.write_text("")
    except OSError as error:
        raise LaunchError(
            f"{log} cannot be written ({system_words(error)}).",
            "let this user write there, or activate an environment that has what is missing (README.Installation.md).",
        ) from None
    if base:
        _step("making .venv", log, base, "-m", "venv", str(ROOT / ".venv"))
    pip = (python, "-m", "pip", "install", "--disable-pip-version-check")
    if not gpus and not _succeeds(python, "-", "torch", source=_HAS_MODULES):
        _step("installing torch", log, *pip, CPU_TORCH)
    extras = ",".join(name for name in ("gpu" if gpus else "", extra) if name)
    doing = f"installing DistCA{f' with {extras}' if extras else ''}"
    _step(doing, log, *pip, "-e", f"{ROOT}[{extras}]" if extras else str(ROOT))
    return _activate()


def _activate() -> str:
    """Put .venv's programs first on PATH, for the ranks too; its Python."""
    folder = _venv_python().parent
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return str(_venv_python())


def _venv_python() -> Path:
    return ROOT / ".venv" / "bin" / "python"


def _base_python() -> str:
    """The newest Python that DistCA runs on and that can make a virtual environment."""
    for python in _bases():
        if _succeeds(python, "-c", _CAN_BE_BASE):
            return python
    raise LaunchError(
        "There is no Python 3.11 or 3.12 with venv on PATH.", "install one, or activate an environment that has it."
    )


def _bases() -> Iterator[str]:
    # A shim of pyenv may be on PATH and not work; its versions do.
    pyenv = Path(os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")) / "versions"
    for version in ("3.12", "3.11"):
        yield f"python{version}"
        yield from map(str, pyenv.glob(f"{version}.*/bin/python"))
    yield from ("python3", "python")


def _succeeds(python: str, *arguments: str, source: str = "") -> bool:
    try:
        return not subprocess.run([python, *arguments], input=source, text=True, capture_output=True).returncode
    except OSError:
        return False


def _step(doing: str, log: Path, *command: str) -> None:
    """One step of the installation, with a sign of life."""
    began, terminal = time.monotonic(), sys.stderr.isatty()
    with log.open("a") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    for seconds in range(1 << 30):
        if terminal:
            say(f"\r  {doing} ... {seconds}s ", end="")
        elif seconds % 30 == 0:
            say(f"  {doing} ... {seconds}s")
        try:
            process.wait(began + seconds + 1 - time.monotonic())
            break
        except subprocess.TimeoutExpired:
            pass
    if terminal:
        say("")
    if process.returncode:
        say("\n".join(log.read_text(errors="replace").splitlines()[-5:]))
        raise LaunchError(
            f"This step of the installation failed: {doing}.", f"read {log}, then start again; what is installed stays."
        )


def _main() -> int:
    extra = sys.argv[1]
    sys.stdout.write(f"{find_python(extra) or install(gpus_here() > 0, extra)}\n")
    return 0


if __name__ == "__main__":
    leave(_main)
