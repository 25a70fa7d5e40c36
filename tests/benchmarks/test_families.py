"""Training of families of models beside transformers: some of them, and what is kept of all."""

import json
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest

from benchmarks.families import PARTS, TOLERANCE, Errors, compare
from benchmarks.family_models import CASES
from megatron_patches.versions import has_gated_delta_net


@pytest.mark.matrix  # the kept result below has them; tests/train/test_fine_tuning.py trains beside transformers too
def test_gradients_and_two_steps_are_those_of_transformers():
    """Windows, capped scores, four norms, and experts, of which some have biases and MXFP4 and others a shared one,
    Mamba-2, and latent attention."""
    newer = ["nemotron_h", "deepseek_v3"] if has_gated_delta_net() else []
    found = compare(["gemma2", "gpt_oss, mxfp4", "glm4_moe, fused", *newer], steps=2)
    assert all(errors.equal for errors in found.values()), found
    assert [errors.tensors for errors in found.values()][:3] == [46, 61, 95]


def test_an_error_that_is_no_number_is_not_equal():
    right = Errors(TOLERANCE, "", TOLERANCE, TOLERANCE, 1)
    assert right.equal
    for name in ("gradients", "losses", "weights"):
        assert not replace(right, **{name: nan}).equal and not replace(right, **{name: 2 * TOLERANCE}).equal


def test_the_kept_result_is_of_every_family():
    kept = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "family_gradients.json").read_text())
    assert kept["different"] == []
    for part in PARTS:
        assert kept[part].keys() == CASES.keys() and all(Errors(**errors).equal for errors in kept[part].values())
