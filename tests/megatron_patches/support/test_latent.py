"""Latent attention is refused wherever nothing holds it against Megatron-Core."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_patches.arguments import CadArguments
from megatron_patches.layers.latent_attention import ReplicatedLinear
from megatron_patches.model.model_options import ModelOptions
from megatron_patches.support.config_fields import check_config
from megatron_patches.support.latent import check_latent
from megatron_patches.support.trained_weights import _fused_weights
from tests.megatron_patches.support.cases import LLAMA, refusal

SIZES = {"q_lora_rank": 12, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6}


@pytest.fixture(autouse=True)
def _the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_patches.support.latent.has_gated_delta_net", lambda: True)


def _config(**fields: Any) -> MLATransformerConfig:
    config = MLATransformerConfig(**{**LLAMA, **SIZES})
    config.num_query_groups = config.num_attention_heads
    for name, value in fields.items():  # which Megatron would refuse in part, when it makes one
        setattr(config, name, value)
    return config


def _said(config: TransformerConfig, **arguments: Any) -> str | None:
    return refusal(check_latent, config, CadArguments(tokens_per_rank=8, **arguments))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_type": "rope"},
        {"q_lora_rank": None, "qk_layernorm": True},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ],
)
def test_what_is_served(fields: dict[str, Any]) -> None:
    assert refusal(check_config, _config(**fields)) is None
    assert _said(_config(**fields)) is None
    assert _said(_config(), offload=True, disaggregate=False) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"num_query_groups": 1},
        {"v_head_dim": 13},
        {"qk_pos_emb_head_dim": 3},
        {"experimental_attention_variant": "gated_delta_net"},
        {"window_size": (6, 0)},
        {"softmax_type": "learnable"},
        {"softmax_scale": 0.1},
        {"no_rope_freq": [1, 0]},
        {"apply_rope_fusion": True},
        {"rope_type": "none"},
        {"fp8": "hybrid"},
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any]) -> None:
    said = _said(_config(**fields))
    assert said is not None and next(iter(fields)) in said and "or do without" in said


@pytest.mark.parametrize(
    "arguments",
    [
        {"model_options": replace(ModelOptions(), norms="post")},
        {"hybrid_layer_pattern": "*-"},
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any]) -> None:
    said = _said(_config(), **arguments)
    assert said is not None and next(iter(arguments)) in said


def test_the_epsilon_of_latent_rows_is_served_with_them_alone() -> None:
    options = replace(ModelOptions(), latent_norm_epsilon=1e-6)
    assert _said(_config(), model_options=options) is None
    said = _said(TransformerConfig(**LLAMA), model_options=options)
    assert said is not None and said.startswith("`latent_norm_epsilon` is 1e-06, but the model has no latent attention")


def test_tensor_parallel_ranks_share_rows() -> None:
    said = _said(_config(tensor_model_parallel_size=2))
    assert said is not None and "sequence_parallel is False with tensor_model_parallel_size 2: set" in said


def test_other_configurations_are_refused() -> None:
    plain = TransformerConfig(**LLAMA)
    assert _said(plain) is None
    plain.multi_latent_attention = True
    assert "make an MLATransformerConfig" in str(_said(plain))
    assert str(refusal(check_config, _config(cache_mla_latents=True))).startswith("cache_mla_latents is True, but")


def test_a_hook_on_the_gradient_of_a_down_projection_is_seen() -> None:
    """Its gradient goes to ``main_grad`` only."""
    config = SimpleNamespace(
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=torch.float32,
        sequence_parallel=False,
        gradient_accumulation_fusion=True,
    )
    linear = ReplicatedLinear(4, 2, config)
    assert [each is linear.weight for each in _fused_weights(linear)] == [True]
    linear.weight.requires_grad_(False).normal_()
    rows = torch.randn(3, 4, requires_grad=True)
    found, _ = linear(rows)
    found.sum().backward()
    assert torch.equal(found, rows @ linear.weight.T) and torch.equal(rows.grad, linear.weight.sum(0).expand(3, 4))
