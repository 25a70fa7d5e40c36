"""That every field, argument and module of megatron-core is sorted: served, or refused with a sentence."""

import ast
import dataclasses
import inspect
import textwrap
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from distca.errors import SupportError
from megatron_patches.support.config_fields import LIMITS, SERVED, check_config, check_types
from tests.megatron_patches.support.cases import LLAMA, refusal

FIELDS = {field.name: field for field in dataclasses.fields(TransformerConfig)}
# A value that is not served, where one that is merely not the default might be.
UNSERVED = {
    "normalization": "L2Norm",
    "params_dtype": torch.float16,
    "transformer_impl": "inference_optimized",
    "recompute_granularity": "full",
    "hidden_dropout": 0.2,
    "attention_dropout": 0.2,
    "calculate_per_token_loss": False,
}


def _changed(**fields):
    """A served configuration with other values; set afterwards, because megatron refuses some itself."""
    config = TransformerConfig(**LLAMA)
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def _away_from_default(name):
    if name in UNSERVED:
        return UNSERVED[name]
    value = getattr(TransformerConfig(**LLAMA), name)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 2  # heads have an even number of elements
    if isinstance(value, list):
        return [*value, "more"]
    return "another" if isinstance(value, str) else 3


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_served_or_refused_by_its_name(name):
    refused = refusal(check_config, _changed(**{name: _away_from_default(name)}))
    if name in SERVED - {"num_moe_experts", "expert_model_parallel_size"}:
        assert refused is None
    else:
        named = "moe_token_dispatcher_type" if name == "num_moe_experts" else name
        assert refused.startswith(f"{named} is ") and refused.endswith("."), refused


def test_every_field_of_the_installed_version_is_sorted_once():
    assert set(FIELDS) <= SERVED | set(LIMITS)
    assert not SERVED & set(LIMITS)


def test_defaults_of_limited_fields_are_served_where_a_llama_has_them():
    assert refusal(check_config, TransformerConfig(**LLAMA)) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("softmax_type", "off-by-one"),
        ("qk_clip", True),
        ("qk_l2_norm", True),
        ("apply_query_key_layer_scaling", True),
        ("attention_dropout", 0.1),
        ("hidden_dropout", 0.1),
        ("context_parallel_size", 2),
        ("normalization", "L2Norm"),
        ("fp32_residual_connection", True),
        ("mtp_num_layers", 1),
        ("fp8_recipe", "mxfp8"),
        ("fp8_multi_head_attention", True),
        ("fp8_wgrad", False),
        ("first_last_layers_bf16", True),
        ("tp_comm_overlap", True),
        ("fp4", "e2m1"),
        ("fp16", True),
        ("cuda_graph_impl", "local"),
        ("cpu_offloading", True),
        ("fine_grained_activation_offloading", True),
        ("heterogeneous_block_specs", True),
        ("virtual_pipeline_model_parallel_size", 2),
        ("recompute_granularity", "full"),
        ("experimental_attention_variant", "dsa"),
    ],
)
def test_what_would_be_lost_is_refused(field, value):
    refused = refusal(check_config, _changed(**{field: value}))
    assert refused.startswith(f"{field} is {value!r}, but "), refused


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, "recompute_modules is"),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, None),
        ({"recompute_modules": ["core_attn"]}, None),
        ({"num_query_groups": 1, "tensor_model_parallel_size": 2}, "num_query_groups is 1, fewer than"),
        ({"num_query_groups": 2, "tensor_model_parallel_size": 2}, None),
        ({"kv_channels": 7}, "kv_channels is 7, but rotary positions turn pairs"),
        ({"kv_channels": 7, "multi_latent_attention": True}, None),
        ({"qk_layernorm": True, "add_qkv_bias": True, "softmax_scale": 0.1}, None),
        ({"moe_router_topk": 5, "fp8_margin": 2, "cp_comm_type": "p2p"}, None),
    ],
)
def test_fields_that_count_together(fields, said):
    refused = refusal(check_config, _changed(**fields))
    assert (refused is None) if said is None else refused.startswith(said)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, None),
        ({"bf16": True, "params_dtype": torch.bfloat16}, None),
        ({"bf16": True}, "bf16 is True and params_dtype is torch.float32, but "),
        ({"params_dtype": torch.bfloat16}, "bf16 is False and params_dtype is torch.bfloat16, but "),
        ({"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}, None),
        ({"pipeline_model_parallel_size": 2}, "pipeline_dtype is None and params_dtype is torch.float32, but "),
    ],
)
def test_numbers_of_one_type_throughout(fields, said):
    refused = refusal(check_types, _changed(**fields))
    assert (refused is None) if said is None else refused.startswith(said)


def test_a_block_is_not_disaggregated_with_what_is_refused():
    from megatron_patches.layers.block import disaggregate_block

    for fields in ({"hidden_dropout": 0.1}, {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}):
        block = SimpleNamespace(config=_changed(**fields))
        with pytest.raises(SupportError):
            disaggregate_block(block, None, recompute_segments=True)


@dataclasses.dataclass
class _LaterConfig(TransformerConfig):
    attention_softcap: float | None = None
    sinks: list = dataclasses.field(default_factory=list)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, None),
        ({"attention_softcap": 30.0}, "attention_softcap is 30.0, but .* leave it at its default."),
        ({"sinks": [1]}, r"sinks is \[1\], but .* _LaterConfig"),
    ],
)
def test_an_unknown_field_away_from_its_default_is_refused(fields, said):
    config = _LaterConfig(**LLAMA, **fields)
    if said is None:
        return check_config(config)
    with pytest.raises(SupportError, match=said):
        check_config(config)


# GPTModel asks a configuration for these; only those of latent attention, or of YaRN and Megatron-LM's models, have
# them, and what comes of them is seen in the model.
NOT_FIELDS = {
    "position_embedding_type",
    "rotary_base",
    "cache_mla_latents",
    "kv_lora_rank",
    "get_config_for_layer",
}


def _reads(part):
    """Names of the fields that a class reads of a configuration."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(part)))):
        if isinstance(node, ast.Attribute) and _is_config(node.value):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            read, name, *_ = node.args
            if _is_config(read) and isinstance(name, ast.Constant):
                yield name.value


def _is_config(node):
    if isinstance(node, ast.Attribute):
        return node.attr == "config" and getattr(node.value, "id", "") == "self"
    return getattr(node, "id", "") in ("config", "layer_config", "tmp_config")


@pytest.mark.parametrize(
    "part",
    [
        TransformerBlock,
        TransformerLayer,
        Attention,
        SelfAttention,
        DotProductAttention,
        MLP,
        GPTModel,
        LanguageModule,
        LanguageModelEmbedding,
        VocabParallelEmbedding,
        ColumnParallelLinear,
        RowParallelLinear,
    ],
)
def test_every_field_that_megatron_reads_is_sorted(part):
    read = {name for name in _reads(part) if not name.startswith("yarn_")} - NOT_FIELDS
    assert read, "the source is understood"
    assert read <= SERVED | set(LIMITS)
