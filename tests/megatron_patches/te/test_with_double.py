"""Disaggregated layers around Transformer Engine's linear layers, with a double of these on CPU ranks.

The newest Megatron-Core is tested with the newest Transformer Engine; ``.ci/run`` tests the oldest with the oldest.
Weights held as FP8 numbers alone train as bfloat16 ones do that are quantised for every step, and leave the same
checkpoints and folders.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_patches.versions import has_gated_delta_net
from tests.megatron_patches.te import fp8_ranks
from tests.megatron_patches.te.fp8_ranks import SAVED_AFTER
from tests.megatron_patches.te.fp8_tensor import Float8Tensor
from tests.megatron_patches.te.rank import LENGTHS, RECOMPUTED, STEPS
from tests.train.small_runs import ROOT, steps_of, write_texts

VERSION = "2.20.2" if has_gated_delta_net() else "2.11.0"  # a layer of 0.19 and newer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("double")
    write_texts(made / "texts")
    command = [sys.executable, "-m", "tests.megatron_patches.te.process", str(made), VERSION]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    return made


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((folder / "linears.json").read_text())
    return answer


@pytest.mark.parametrize("recompute", RECOMPUTED)
def test_every_half_adds_to_the_gradients(found: dict[str, Any], recompute: str) -> None:
    """Without FP8 they are the same products; one that overwrote the other half's gradient would show in the norms."""
    local, te = found["local"], found[f"none {recompute}"]
    assert (local["kind"], te["kind"]) == ("ColumnParallelLinear", "ColumnLinear")
    assert te["losses"] == pytest.approx(local["losses"], rel=1e-6)
    assert te["norms"] == pytest.approx(local["norms"], rel=1e-6)
    assert te["names"] == local["names"]


@pytest.mark.parametrize("fp8", ["current", "delayed"])
def test_weights_are_quantised_once_a_step_or_for_each_segment(found: dict[str, Any], fp8: str) -> None:
    kept, recomputed = found[f"{fp8} none"], found[f"{fp8} all"]
    assert kept["quantised"] == found["packed"]["quantised"] == STEPS
    assert (kept["copies"], recomputed["copies"]) == (1, 0)
    # Halves of a micro-batch, forward and again in backward.
    assert recomputed["quantised"] == 2 * 2 * len(LENGTHS) * STEPS


@pytest.mark.parametrize("fp8", ["current", "delayed"])
def test_fp8_computes_in_fp8_and_what_is_recomputed_is_the_same(found: dict[str, Any], fp8: str) -> None:
    plain, local = found[f"{fp8} none"], found["local"]
    assert plain["losses"] != pytest.approx(local["losses"], rel=1e-5)
    assert plain["losses"] == pytest.approx(local["losses"], rel=0.02)
    assert plain["norms"][0] == pytest.approx(local["norms"][0], rel=0.02)
    for key in ("losses", "norms"):
        assert found[f"{fp8} all"][key] == pytest.approx(plain[key], rel=1e-6)


def test_delayed_scales_move_on_once_a_step(found: dict[str, Any]) -> None:
    for recompute in RECOMPUTED:
        assert found[f"delayed {recompute}"]["updates"] == 2 * STEPS  # forward and backward
        assert found[f"current {recompute}"]["updates"] == 0


def test_transformer_engines_own_layer_spec_is_served(found: dict[str, Any]) -> None:
    assert found["spec"]["auto"] == found["spec"]["te"] == ["True", "ColumnLinear"]


def test_its_spec_is_refused_where_linear_layers_are_to_be_local(found: dict[str, Any]) -> None:
    te, said = found["spec"]["local"]
    assert te == "False"
    assert said.startswith("the layer spec has Transformer Engine's linear layers, but `linears` is local,")


def test_a_history_of_another_length_begins_anew_with_its_scales(found: dict[str, Any]) -> None:
    assert found["history"] == {"as long": [2.0, 2.0, 24.0], "longer": [1.0, 1.0, 12.0]}


def _check_alike(folder: Path, one: str, other: str) -> None:
    """Two runs have the same losses, and norms but for the order in which weights were added up."""
    losses, norms = ([steps_of(folder / name, key) for name in (one, other)] for key in ("loss", "grad_norm"))
    assert losses[0] == losses[1] and norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert len(set(losses[0].values())) == fp8_ranks.STEPS


def test_steps_are_those_with_bfloat16_weights(folder: Path) -> None:
    _check_alike(folder, "plain", "fp8")


@pytest.mark.parametrize("whole, resumed", [("fp8", "again"), ("fp8", "wide"), ("plain", "narrow")])
def test_a_run_goes_on_with_either_kind_of_weights(folder: Path, whole: str, resumed: str) -> None:
    _check_alike(folder, whole, resumed)


def test_a_run_goes_on_with_gradients_and_moments_in_fewer_bytes(folder: Path) -> None:
    whole, fewer = (steps_of(folder / name) for name in ("fp8", "fewer"))
    assert fewer == pytest.approx(whole, rel=1e-2) and fewer[fp8_ranks.STEPS] != whole[fp8_ranks.STEPS]


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

    assert all(torch.equal(files.read(name), tensor) for name, tensor in saved("fp8", fp8_ranks.STEPS).items())
    for step in (SAVED_AFTER, fp8_ranks.STEPS):
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
