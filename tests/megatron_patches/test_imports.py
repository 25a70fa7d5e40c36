"""Megatron-Core is imported on CPUs without Triton, and without a Transformer Engine that cannot be used there.

One other process imports it for all tests here, as Megatron-Core asks once what there is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron_patches.te.test_installed import install

ROOT = Path(__file__).parents[2]
WITHOUT_TRITON = """
import sys, importlib.util, warnings
warnings.simplefilter("ignore")
sys.modules["triton"] = None
import megatron_patches.ranks.world as world
world._use_cpu()
from megatron_patches.model import gpt as model
from megatron_patches.training import pipeline_schedule, training_step
from megatron.core.extensions.transformer_engine import HAVE_TE
print(HAVE_TE, "transformer_engine" in sys.modules, importlib.util.find_spec("transformer_engine") is not None)
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    folder = tmp_path_factory.mktemp("installed")
    install(folder, "2.11.0", torch_part=True)
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", WITHOUT_TRITON]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_models_are_imported_without_triton(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0, result.stderr


def test_transformer_engine_is_hidden_from_megatron_without_a_gpu(result: subprocess.CompletedProcess[str]) -> None:
    assert result.stdout == "False False True\n"
