"""Weights held as FP8 numbers alone, on two CPU ranks with a double of Transformer Engine: the same training as with
bfloat16 weights that are quantised for every step, and the same checkpoints and folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.megatron_patches.te.fp8_ranks import SAVED_AFTER, STEPS
from tests.megatron_patches.te.fp8_tensor import Float8Tensor
from tests.train.small_runs import ROOT, steps_of, write_texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fp8_weights")
    write_texts(made / "texts")
    command = [sys.executable, "-m", "tests.megatron_patches.te.fp8_ranks", str(made)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    return made


def _check_alike(folder: Path, one: str, other: str) -> None:
    """Two runs have the same losses, and norms but for the order in which weights were added up."""
    losses, norms = ([steps_of(folder / name, key) for name in (one, other)] for key in ("loss", "grad_norm"))
    assert losses[0] == losses[1] and norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert len(set(losses[0].values())) == STEPS


def test_steps_are_those_with_bfloat16_weights(folder: Path) -> None:
    _check_alike(folder, "plain", "fp8")


@pytest.mark.parametrize("whole, resumed", [("fp8", "again"), ("fp8", "wide"), ("plain", "narrow")])
def test_a_run_goes_on_with_either_kind_of_weights(folder: Path, whole: str, resumed: str) -> None:
    _check_alike(folder, whole, resumed)


def test_a_run_goes_on_with_gradients_and_moments_in_fewer_bytes(folder: Path) -> None:
    whole, fewer = (steps_of(folder / name) for name in ("fp8", "fewer"))
    assert fewer == pytest.approx(whole, rel=1e-2) and fewer[STEPS] != whole[STEPS]


def test_weights_are_fp8_by_rows_and_main_weights_float32(folder: Path) -> None:
    for name in ("fp8", "again", "narrow", "fewer"):
        found = json.loads((folder / name / "found.json").read_text())
        assert found.pop("main") == ["torch.float32"], name
        nothing = dict.fromkeys(["columns before updates", "rows transposed", "left"], 0)
        assert found == {"fp8": 1.0, **nothing}, name
    assert json.loads((folder / "wide" / "found.json").read_text())["fp8"] == 0


def test_checkpoints_and_folders_hold_the_main_weights(folder: Path) -> None:
    from distca.models.description import describe_folder
    from distca.models.tensors import TensorFiles
    from megatron_patches.checkpoint.whole_weights import SavedWeights

    described, files = describe_folder(folder / "exported"), TensorFiles(folder / "exported")

    def saved(run: str, step: int) -> dict[str, torch.Tensor]:
        return dict(SavedWeights(folder / run / "checkpoints" / f"step_{step:06d}", described).tensors())

    assert all(torch.equal(files.read(name), tensor) for name, tensor in saved("fp8", STEPS).items())
    for step in (SAVED_AFTER, STEPS):
        found, expected = saved("fp8", step), saved("plain", step)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, expected[name]), name


def test_a_weight_that_is_set_is_quantised_and_main_weights_are_made_of_what_it_was_set_to() -> None:
    from megatron_patches.te.fp8_weights import set_values

    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    plain = torch.nn.Parameter(torch.zeros(4, 6))
    set_values(plain, values)
    assert torch.equal(plain, values)
    weight: Any = torch.nn.Parameter(Float8Tensor.of(torch.zeros(4, 6, dtype=torch.bfloat16)))
    weight._high_precision_init_val = torch.zeros(4, 6, dtype=torch.bfloat16)
    with patch("megatron.core.fp8_utils.is_float8tensor", lambda each: isinstance(each, Float8Tensor)):
        set_values(weight, values)
    assert torch.equal(weight._high_precision_init_val, values.bfloat16())
    assert torch.equal(weight.dequantize(), Float8Tensor.of(values.bfloat16()).dequantize())
