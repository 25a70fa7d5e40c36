"""Disaggregated layers around Transformer Engine's linear layers, with a double of these on one CPU rank.

The newest Megatron-Core is tested with the newest Transformer Engine; ``.ci/run`` tests the oldest with the oldest.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_patches.versions import has_gated_delta_net
from tests.megatron_patches.te.rank import LENGTHS, RECOMPUTED, STEPS

ROOT = Path(__file__).parents[3]
VERSION = "2.20.2" if has_gated_delta_net() else "2.11.0"  # a layer of 0.19 and newer


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.megatron_patches.te.rank", VERSION]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    answer: dict[str, Any] = json.loads(run.stdout)
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
