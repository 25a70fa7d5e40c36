"""Installs DistCA. Everything but the build of the optional CUDA library is declared in pyproject.toml.

No compiler is needed: where nvcc is missing, or cannot compile csrc/, everything else is installed and rows move by
NCCL. ``distca doctor`` says which of the two it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Ampere, Hopper and, by just-in-time compilation, everything newer.
ARCHITECTURES = ["arch=compute_80,code=sm_80", "arch=compute_90,code=[sm_90,compute_90]"]


def find_nvcc() -> str | None:
    """CUDA's compiler, from the PATH or CUDA_HOME."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(home, "bin"))


class BuildCudaLibrary(build_ext):
    """Compiles a .cu file into a shared library with a C interface, which Python loads through ctypes."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = [flag for architecture in ARCHITECTURES for flag in ("-gencode", architecture)]
        command = ["nvcc", "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", *flags, "-o", str(target)]
        command[0] = find_nvcc() or command[0]
        try:
            subprocess.run(command + ext.sources, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self.warn(f"the CUDA library was not built, rows will move by NCCL: {error}")


extensions = [Extension("distca.transport._rows", ["csrc/row_moves.cu"], optional=True)] if find_nvcc() else []
setup(ext_modules=extensions, cmdclass={"build_ext": BuildCudaLibrary})
