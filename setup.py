"""Installs DistCA. Everything but the build of the optional CUDA extension is declared in pyproject.toml.

No compiler is needed. The extension in csrc/ is optional and is not built here yet; its place is ``ext_modules`` below,
so that a machine without nvcc still installs everything else.
"""

from setuptools import setup

setup(ext_modules=[])
