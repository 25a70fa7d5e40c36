"""The package: what a wheel holds, and that planning and ``import distca`` need numpy only."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import distca
from distca.train.launch.installation import CPU_TORCH

ROOT = Path(__file__).parents[1]

BLOCK_EVERYTHING_BUT_NUMPY = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "megatron", "rich", "yaml", "jsonargparse", "matplotlib", "psutil"):
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path.insert(0, Blocker())
import distca, distca.plan
layout, = distca.plan.lay_out([5, 3], 2)
distca.plan.plan_at_home(layout).check()
assert "torch" not in sys.modules
"""


def test_planning_needs_numpy_only() -> None:
    result = subprocess.run(
        [sys.executable, "-c", BLOCK_EVERYTHING_BUT_NUMPY], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_launching_needs_the_standard_library_only() -> None:
    """It runs before anything is installed; -S leaves installed packages out."""
    modules = "distca.train.launch.pretrain, distca.train.launch.installation, benchmarks.throughput.launch"
    result = subprocess.run(
        [sys.executable, "-S", "-c", f"import {modules}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_wheel_holds_every_package_and_its_data(tmp_path: Path) -> None:
    # A copy: building leaves files beside setup.py.
    source = tmp_path / "source"
    source.mkdir()
    packages = [name for name in ("distca", "megatron_patches") if (ROOT / name).is_dir()]
    ours = [
        path.relative_to(ROOT)
        for name in packages
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".csv", ".json", ".typed") and "__pycache__" not in path.parts
    ]
    for path in [*ours, Path("setup.py"), Path("pyproject.toml"), Path("README.md"), Path("LICENSE")]:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes((ROOT / path).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w"]
    result = subprocess.run([*command, str(tmp_path), str(source)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("distca-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        scripts = archive.read(f"distca-{distca.__version__}.dist-info/entry_points.txt").decode()
    assert {str(path) for path in ours} <= held
    assert "distca = distca.commands.main:main" in scripts
    assert not [name for name in held if name.startswith("tests")]


def test_every_folder_of_modules_is_a_package() -> None:
    for name in ("distca", "megatron_patches"):
        for module in (ROOT / name).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), f"{module.parent} needs an __init__.py"


def test_versions_that_are_named_twice_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # CI tests the oldest Megatron-Core that the package accepts.
    (megatron,) = [entry for entry in project["dependencies"] if entry.startswith("megatron-core")]
    (oldest,) = re.findall(r"^oldest=(\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert megatron.startswith(f"megatron-core>={oldest},<")
    # The launchers install a torch that the package accepts, the one that the guide names.
    assert f"pip install {CPU_TORCH} " in (ROOT / "README.Installation.md").read_text()
    version = CPU_TORCH.removeprefix("torch==")
    (lowest,) = [entry for entry in project["dependencies"] if entry.startswith("torch>=")]
    assert tuple(map(int, version.split("."))) >= tuple(map(int, lowest.removeprefix("torch>=").split(".")))
