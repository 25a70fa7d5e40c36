"""Hybrid stacks are refused wherever nothing holds them against Megatron-Core."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from megatron_patches.model.model_options import MEGATRONS, ModelOptions
from megatron_patches.support.hybrid import check_hybrid
from tests.megatron_patches.support.cases import refusal

NET = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "num_layers": 4,
    "attention_output_gate": True,
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "pipeline_model_parallel_size": 1,
    "normalization": "RMSNorm",
    "activation_func": functional.silu,
    "num_moe_experts": None,
    "rotary_interleaved": False,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_TENSOR_PARALLEL = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
_STAGES, _EVEN = {"pipeline_model_parallel_size": 2}, {"linear_attention_freq": 2}
GATE = {**NET, "experimental_attention_variant": None}
TURNED = {**GATE, "rotary_interleaved": True}


@pytest.fixture(autouse=True)
def _cpu_and_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("megatron_patches.support.hybrid.has_gated_delta_net", lambda: True)


def _said(
    fields: dict[str, Any],
    *,
    pattern: str = "",
    options: ModelOptions = MEGATRONS,
    disaggregate: bool = True,
    offload: bool = False,
) -> str | None:
    return refusal(check_hybrid, SimpleNamespace(**fields), pattern, options, disaggregate, offload)


@pytest.mark.parametrize("fields", [NET, TURNED, {**NET, **_TENSOR_PARALLEL}, {**NET, **_STAGES, **_EVEN}])
def test_what_is_served(fields: dict[str, Any]) -> None:
    assert _said(fields) is None


def test_models_without_either_are_not_looked_at() -> None:
    assert _said({**GATE, "attention_output_gate": False, "tensor_model_parallel_size": 8}, disaggregate=False) is None


@pytest.mark.parametrize(
    ("changed", "how", "said"),
    [
        (
            {"tensor_model_parallel_size": 2},
            {},
            "sequence_parallel is False with tensor_model_parallel_size 2: set sequence_parallel",
        ),
        ({"num_moe_experts": 8}, {}, "num_moe_experts is 8: set it to None"),
        (_STAGES, {}, "linear_attention_freq is 4, which gives the 2 stages of pipeline_model_parallel_size diff"),
        (_STAGES | _EVEN, {"disaggregate": False}, "pipeline_model_parallel_size is 2: set it to 1"),
        ({"normalization": "LayerNorm"}, {}, "normalization is 'LayerNorm': set it to 'RMSNorm'"),
        ({"activation_func": functional.gelu}, {}, "activation_func is not SiLU"),
        ({"linear_attention_freq": 1}, {}, "linear_attention_freq is 1, but"),
        ({"linear_conv_kernel_dim": 0}, {}, "linear_conv_kernel_dim is 0, but the model has gated delta nets"),
        ({"linear_attention_freq": 5}, {}, "set it to a number N from 2 to 4"),
        ({"linear_attention_freq": 1, "num_layers": 1}, {}, "set num_layers to 2 or more"),
        ({"linear_attention_freq": [1, 1, 1, 1]}, {}, "of which some must have softmax attention"),
        ({"linear_attention_freq": [[1], 0, 0, 1]}, {}, "of which some must have softmax attention"),
        ({}, {"options": ModelOptions(norms="post")}, "`model_options` are not the defaults"),
        ({}, {"disaggregate": False}, "`disaggregate` is False: set it to True"),
        ({}, {"offload": True}, "`offload` is True: set it to False"),
    ],
)
def test_what_is_not(changed: dict[str, Any], how: dict[str, Any], said: str) -> None:
    refused = _said({**NET, **changed}, **how)
    assert refused is not None and said in refused


def test_older_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_patches.support.hybrid.has_gated_delta_net", lambda: False)
    assert all("install 0.19" in str(_said(fields)) for fields in (NET, GATE))


STACK = {
    **GATE,
    "attention_output_gate": False,
    "num_layers": 4,
    "hidden_size": 32,
    "mamba_head_dim": 64,
    "mamba_num_groups": 2,
    "mamba_num_heads": 4,
    "mamba_state_dim": 8,
}


@pytest.mark.parametrize("pattern", ["G-*-", "*-*-", "-*GG", "M-*M"])
def test_patterns_that_are_served(pattern: str) -> None:
    assert _said(STACK, pattern=pattern) is None


@pytest.mark.parametrize(
    ("pattern", "changed", "said"),
    [
        ("G-|*-", {"pipeline_model_parallel_size": 2}, "put a '|' between stages of equal patterns"),
        ("G*|G*", {}, "but pipeline_model_parallel_size is 1, and all stages must have the same layers"),
        ("G*G*", {"pipeline_model_parallel_size": 2}, "hybrid_layer_pattern is 'G*G*', but pipeline_model_parallel"),
        ("G-*/*", {}, "has '/', but only the next token is predicted"),
        ("G-+-", {}, "has '+', but latent attention is not supported"),
        ("D-*-", {}, "has 'D', but sparse attention is not supported"),
        ("G-X-", {}, "has 'X', but symbols are * G M - E"),
        ("G-G-", {}, "has no '*'"),
        ("G-*-G-", {}, "num_layers is 4, but hybrid_layer_pattern 'G-*-G-' has 6 layers: set num_layers to 6"),
        ("*-*-", {"rotary_interleaved": True}, "is not supported where rotary_interleaved is True: set it to False"),
        ("G-*E", {}, "num_moe_experts is None, but hybrid_layer_pattern is 'G-*E'"),
        ("G-*-", {"experimental_attention_variant": "gated_delta_net"}, "'gated_delta_net': set it to None"),
        ("M-*-", {**_TENSOR_PARALLEL, "tensor_model_parallel_size": 4}, "mamba_num_groups is 2"),
        ("M-*-", {"mamba_num_groups": 0}, "mamba_num_groups is 0"),
        ("M-*-", {"mamba_num_heads": None, "mamba_head_dim": 0}, "mamba_head_dim is 0: set it to at least 1"),
        ("M-*-", {"mamba_state_dim": 0}, "mamba_state_dim is 0: set it to at least 1"),
        ("M-*-", {"mamba_num_heads": 3}, "mamba_num_heads is 3"),
        ("M-*-", {"mamba_num_heads": None}, "mamba_num_heads is 1, but must be a multiple of mamba_num_groups 2"),
        ("G-*-", {"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim is None, but the model has gated delta"),
        ("G-*-", {"linear_num_key_heads": 3}, "linear_num_value_heads is 4, but must be a multiple of linear_num_key"),
        (
            "G-*-",
            {**_TENSOR_PARALLEL, "linear_num_key_heads": 1},
            "linear_num_key_heads is 1, but must be a multiple of tensor_model_parallel_size 2",
        ),
    ],
)
def test_patterns_that_are_refused(pattern: str, changed: dict[str, Any], said: str) -> None:
    assert said in (_said({**STACK, **changed}, pattern=pattern) or "")


@pytest.mark.parametrize(
    ("pattern", "options", "said"),
    [
        ("G-*-", ModelOptions(plain_recurrent_norm=True, rotations=(None,) * 4), None),
        ("M-*M", ModelOptions(step_min=0.1), None),
        (
            "M-*M",
            ModelOptions(plain_recurrent_norm=True),
            "`plain_recurrent_norm` is True, but hybrid_layer_pattern is",
        ),
        ("G-*-", ModelOptions(step_min=0.1), "'G-*-', and only layers with letter M read `step_min`: leave it out"),
        ("", ModelOptions(step_min=0.1), "`step_min` is 0.1, but hybrid_layer_pattern is ''"),
        ("G-*-", ModelOptions(norms="post"), "more than rotations, plain_recurrent_norm, step_min: leave the rest out"),
    ],
)
def test_options_of_recurrent_layers_belong_to_such_layers(
    pattern: str, options: ModelOptions, said: str | None
) -> None:
    refused = _said(STACK, pattern=pattern, options=options)
    assert refused is None if said is None else said in str(refused)
