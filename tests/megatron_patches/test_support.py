"""That every field, argument and module of megatron-core is sorted: served, or refused with a sentence."""

import ast
import copy
import dataclasses
import inspect
import textwrap
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import Attention, CrossAttention, SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from distca.errors import SupportError
from distca.testing.ranks import run_ranks
from megatron_patches import support
from megatron_patches.support import check_config, check_layer_spec, check_model

FIELDS = {field.name: field for field in dataclasses.fields(TransformerConfig)}
# A value that is not served, where one that is merely not the default might be.
UNSERVED = {
    "normalization": "LayerNorm",
    "params_dtype": torch.float16,
    "transformer_impl": "inference_optimized",
    "recompute_granularity": "full",
    "hidden_dropout": 0.2,
    "attention_dropout": 0.2,
    "calculate_per_token_loss": False,
}
LLAMA = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "normalization": "RMSNorm",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "calculate_per_token_loss": True,
    "use_cpu_initialization": True,
}


def _refusal(check, *arguments):
    """The sentence with which ``check`` refuses, or None."""
    try:
        check(*arguments)
    except SupportError as error:
        return str(error)
    return None


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
        return value + 1
    if isinstance(value, list):
        return [*value, "more"]
    return "another" if isinstance(value, str) else 3


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_served_or_refused_by_its_name(name):
    refused = _refusal(check_config, _changed(**{name: _away_from_default(name)}))
    if name in support._SERVED:
        assert refused is None
    else:
        assert refused.startswith(f"{name} is ") and refused.endswith("."), refused


def test_every_field_of_the_installed_version_is_sorted_once():
    assert set(FIELDS) <= support._SERVED | set(support._LIMITS)
    assert not support._SERVED & set(support._LIMITS)


def test_defaults_of_limited_fields_are_served_where_a_llama_has_them():
    assert _refusal(check_config, TransformerConfig(**LLAMA)) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window_size", (128, 0)),
        ("softmax_type", "learnable"),
        ("attention_output_gate", True),
        ("qk_clip", True),
        ("qk_l2_norm", True),
        ("apply_query_key_layer_scaling", True),
        ("attention_dropout", 0.1),
        ("hidden_dropout", 0.1),
        ("context_parallel_size", 2),
        ("rotary_interleaved", True),
        ("no_rope_freq", [0, 1]),
        ("normalization", "LayerNorm"),
        ("layernorm_zero_centered_gamma", True),
        ("fp32_residual_connection", True),
        ("num_moe_experts", 8),
        ("mtp_num_layers", 1),
        ("fp8_recipe", "mxfp8"),
        ("fp8_multi_head_attention", True),
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
        ("multi_latent_attention", True),
        ("experimental_attention_variant", "gated_delta_net"),
    ],
)
def test_what_would_be_lost_is_refused(field, value):
    refused = _refusal(check_config, _changed(**{field: value}))
    assert refused.startswith(f"{field} is {value!r}, but "), refused


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, "recompute_modules is"),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, None),
        ({"recompute_modules": ["core_attn"]}, None),
        ({"num_query_groups": 1, "tensor_model_parallel_size": 2}, "num_query_groups is 1, fewer than"),
        ({"num_query_groups": 2, "tensor_model_parallel_size": 2}, None),
        ({"qk_layernorm": True, "add_qkv_bias": True, "softmax_scale": 0.1}, None),
        ({"moe_router_topk": 5, "fp8_margin": 2, "cp_comm_type": "p2p"}, None),
    ],
)
def test_fields_that_count_together(fields, said):
    refused = _refusal(check_config, _changed(**fields))
    assert (refused is None) if said is None else refused.startswith(said)


def test_a_block_is_not_disaggregated_with_what_is_refused():
    from megatron_patches.block import disaggregate_block

    for fields in ({"hidden_dropout": 0.1}, {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}):
        block = SimpleNamespace(config=_changed(**fields))
        with pytest.raises(SupportError):
            disaggregate_block(block, None, recompute_segments=True)


def test_latent_attention_is_refused():
    values = {**LLAMA, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8}
    assert _refusal(check_config, MLATransformerConfig(**values)).startswith("multi_latent_attention is True, but")


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
    assert read <= support._SERVED | set(support._LIMITS)


def test_every_argument_of_the_model_is_sorted_once():
    arguments = set(inspect.signature(GPTModel.__init__).parameters) - {"self"}
    assert arguments == support._SERVED_ARGUMENTS | set(support._ARGUMENTS)
    assert not support._SERVED_ARGUMENTS & set(support._ARGUMENTS)


# Layer specs


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


CHANGES = {
    "self_attention.linear_qkv of the layer spec is TELayerNormColumnParallelLinear, whose norm would be applied "
    "twice": lambda spec: setattr(
        spec.submodules.self_attention.submodules, "linear_qkv", TELayerNormColumnParallelLinear
    ),
    "mlp.linear_fc1 of the layer spec is TELayerNormColumnParallelLinear, whose norm": lambda spec: setattr(
        _linears(spec), "linear_fc1", TELayerNormColumnParallelLinear
    ),
    "mlp.linear_fc2 of": lambda spec: setattr(_linears(spec), "linear_fc2", TENorm),
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
}


class _OwnLayer(TransformerLayer):
    pass


@pytest.mark.parametrize("said", CHANGES)
def test_another_layer_spec_is_refused(said):
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    CHANGES[said](spec)
    refused = _refusal(check_layer_spec, spec)
    assert refused.startswith(said) and "get_gpt_layer_local_spec(" in refused


def test_mixtures_of_experts_and_specs_of_whole_blocks_are_refused():
    experts = get_gpt_layer_local_spec(normalization="RMSNorm", num_experts=4)
    assert _refusal(check_layer_spec, experts).startswith("mlp of the layer spec is MoELayer")
    block = TransformerBlockSubmodules([get_gpt_layer_local_spec()])
    assert _refusal(check_layer_spec, block).startswith("the layer spec is a TransformerBlockSubmodules, but")


# Built models


def _models():
    """What check_model says of models that differ from a served one: {what: (expected, found)}."""
    warnings.filterwarnings("ignore")
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    from megatron_patches.block import block_spec
    from megatron_patches.groups import initialize_model_parallel

    initialize_model_parallel(1, 1, 1)
    results = {}

    def build(config=None, spec=None, **arguments):
        config = config or TransformerConfig(**LLAMA)
        spec = spec or block_spec(config)
        named = {"config": config, "transformer_layer_spec": spec, "vocab_size": 16, "max_sequence_length": 32}
        return GPTModel(**named, **{"position_embedding_type": "rope", **arguments})

    def note(what, expected, model):
        results[what] = (expected, _refusal(check_model, model))

    note("served", None, build())
    note("scaled", None, build(rope_scaling=True, rope_scaling_factor=4.0, seq_len_interpolation_factor=2.0))
    note("tied", None, build(share_embeddings_and_output_weights=True, rotary_base=500000, parallel_output=False))
    note("no embedding", None, build(pre_process=False))
    note("no loss", None, build(post_process=False))
    note("norms of heads", None, build(TransformerConfig(**LLAMA, qk_layernorm=True)))
    note("biases", None, build(TransformerConfig(**LLAMA, add_qkv_bias=True)))

    note(
        "learned",
        "position_embedding_type is 'learned_absolute', but",
        build(position_embedding_type="learned_absolute"),
    )
    note("none", "position_embedding_type is 'none', but", build(position_embedding_type="none"))
    note("partial", "rotary_percent is 0.5, but", build(rotary_percent=0.5))
    note("chunk", "vp_stage is 1, but", build(vp_stage=1))
    note("float16", "fp16_lm_cross_entropy is True, but", build(fp16_lm_cross_entropy=True))
    note(
        "scatter",
        "scatter_embedding_sequence_parallel is False, but",
        build(scatter_embedding_sequence_parallel=False),
    )

    overridden = TransformerConfig(**LLAMA)
    overridden.position_embedding_type = "rope"
    note(
        "two types",
        "position_embedding_type is 'learned_absolute', but",
        build(overridden, position_embedding_type="learned_absolute"),
    )
    late = build()
    late.config.window_size = (4, 0)
    note("configuration", "window_size is (4, 0), but", late)

    stock = get_gpt_layer_local_spec(normalization="RMSNorm")
    note(
        "stock",
        "decoder.final_layernorm is a torch.nn.modules.normalization.RMSNorm, but only megatron_patches.",
        build(spec=stock),
    )
    norm = build()
    norm.decoder.layers[1].pre_mlp_layernorm = torch.nn.RMSNorm(32)
    note("norm", "decoder.layers.1.pre_mlp_layernorm is a torch.nn.modules.normalization.RMSNorm", norm)
    adapter = build()
    adapter.decoder.layers[0].mlp.linear_fc2 = torch.nn.Linear(4, 4)
    note(
        "adapter",
        "decoder.layers.0.mlp.linear_fc2 is a torch.nn.modules.linear.Linear, but only megatron.core.",
        adapter,
    )
    head = build()
    head.output_layer = torch.nn.Linear(4, 4)
    note("head", "output_layer is a torch.nn.modules.linear.Linear, but only megatron.core.", head)
    layer = build()
    layer.decoder.layers[1].__class__ = TransformerLayer
    note("layer", "decoder.layers.1 is a megatron.core.transformer.transformer_layer.TransformerLayer, but", layer)
    cross = build()
    cross.decoder.layers[0].cross_attention = torch.nn.Linear(4, 4)
    note("cross", "decoder.layers.0.cross_attention is a torch.nn.modules.linear.Linear, but", cross)
    dropout = build()
    dropout.decoder.layers[0].hidden_dropout = 0.3
    note("dropout", "decoder.layers.0.hidden_dropout is 0.3, but", dropout)
    own = build()
    own.decoder.layers[0].mlp.config = copy.copy(own.config)
    note("own configuration", "decoder.layers.0 has a configuration of its own, but", own)

    heads = build(TransformerConfig(**LLAMA, qk_layernorm=True))
    heads.config.qk_layernorm = False
    said = "qk_layernorm is False, but decoder.layers.0.self_attention.q_layernorm is a RMSNorm"
    note("norms of heads in the spec only", said, heads)
    groups = build()
    groups.pg_collection = copy.copy(groups.pg_collection)
    groups.pg_collection.tp = torch.distributed.new_group([0], backend="gloo")
    note("groups", "pg_collection has a tp group of its own, but", groups)
    return results


def test_models():
    for what, (expected, found) in run_ranks(1, _models)[0].items():
        if expected is None:
            assert found is None, (what, found)
        else:
            assert found is not None and found.startswith(expected), (what, found)
