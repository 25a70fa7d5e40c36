"""Layer specs that are served, and the refusal of others."""

from functools import partial

import pytest
import torch
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.attention import CrossAttention, SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_patches.support.layer_spec import TERowParallelLinear, check_layer_spec, name_of
from tests.megatron_patches.support.cases import refusal


class TELayerNormColumnParallelLinear(torch.nn.Module):
    """Stands for Transformer Engine's, which few have installed."""


class TENorm(torch.nn.Module):
    """Stands for Transformer Engine's."""


def _linears(spec):
    mlp = spec.submodules.mlp
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


@pytest.mark.parametrize("qk_layernorm", [False, True])
def test_megatrons_local_layer_spec_is_served(qk_layernorm):
    check_layer_spec(get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_layernorm))


def test_megatrons_local_layer_spec_with_apexs_layer_norm_is_served():
    spec = get_gpt_layer_local_spec()
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = FusedLayerNorm
    check_layer_spec(spec)


CHANGES = {
    "self_attention.linear_qkv of the layer spec is TELayerNormColumnParallelLinear, whose norm would be applied "
    "twice": lambda spec: setattr(
        spec.submodules.self_attention.submodules, "linear_qkv", TELayerNormColumnParallelLinear
    ),
    "mlp.linear_fc1 of the layer spec is TELayerNormColumnParallelLinear, whose norm": lambda spec: setattr(
        _linears(spec), "linear_fc1", TELayerNormColumnParallelLinear
    ),
    "mlp.linear_fc2 of the layer spec is TENorm, but": lambda spec: setattr(_linears(spec), "linear_fc2", TENorm),
    f"mlp.linear_fc2 of the layer spec is {name_of(TERowParallelLinear)}, but self_attention.linear_qkv is Column": (
        lambda spec: setattr(_linears(spec), "linear_fc2", TERowParallelLinear)
    ),
    "input_layernorm of the layer spec is TENorm, but WrappedTorchNorm": lambda spec: setattr(
        spec.submodules, "input_layernorm", TENorm
    ),
    "self_attention.q_layernorm of the layer spec is L2Norm": lambda spec: setattr(
        spec.submodules.self_attention.submodules, "q_layernorm", L2Norm
    ),
    "module of the layer spec is _OwnLayer": lambda spec: setattr(spec, "module", _OwnLayer),
    "self_attention of the layer spec is CrossAttention": lambda spec: setattr(
        spec.submodules.self_attention, "module", CrossAttention
    ),
    "cross_attention of": lambda spec: setattr(spec.submodules, "cross_attention", SelfAttention),
    "self_attn_bda of": lambda spec: setattr(spec.submodules, "self_attn_bda", TENorm),
    "self_attention.core_attention of": lambda spec: setattr(
        spec.submodules.self_attention.submodules, "core_attention", TENorm
    ),
    "attn_mask_type of the layer spec is AttnMaskType.no_mask": lambda spec: (
        spec.submodules.self_attention.params.update(attn_mask_type=AttnMaskType.no_mask)
    ),
    "mlp of": lambda spec: setattr(spec.submodules, "mlp", TENorm),
    "the layer spec is TransformerLayer without submodules": lambda spec: setattr(spec, "submodules", None),
    "self_attention of the layer spec is SelfAttention without": lambda spec: setattr(
        spec.submodules, "self_attention", SelfAttention
    ),
    "mlp of the layer spec is MLP without submodules": lambda spec: setattr(spec.submodules, "mlp", MLP),
}


class _OwnLayer(TransformerLayer):
    pass


@pytest.mark.parametrize("said", CHANGES)
def test_another_layer_spec_is_refused(said):
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    CHANGES[said](spec)
    refused = refusal(check_layer_spec, spec)
    assert refused.startswith(said) and "get_gpt_layer_local_spec(" in refused


def test_mixtures_of_experts_and_specs_of_whole_blocks_are_refused():
    experts = get_gpt_layer_local_spec(normalization="RMSNorm", num_experts=4)
    assert refusal(check_layer_spec, experts).startswith("mlp of the layer spec is MoELayer")
    block = TransformerBlockSubmodules([get_gpt_layer_local_spec()])
    assert refusal(check_layer_spec, block).startswith("the layer spec is a TransformerBlockSubmodules, but")
