"""Checks a built GPTModel: constructor arguments, configuration, process groups, and classes of modules.

A module must be of exactly the expected class, because a subclass may compute something that this project's layers
leave out. The model itself may be of a subclass of GPTModel.

``hybrid_model.py`` checks a HybridModel with functions of this file. ``CAD`` is the object that a training script
makes, and ``CAD.attach`` changes a model to run with this project.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from distca.errors import SupportError
from megatron_patches.experts.spec import DrawnExperts, has_experts
from megatron_patches.layers.block import with_bias
from megatron_patches.layers.hybrid_layers import SplitRecurrentLayer, layer_class
from megatron_patches.layers.latent_attention import LatentAttention, ReplicatedLinear, WholeRows
from megatron_patches.layers.layer import SplitTransformerLayer
from megatron_patches.layers.packed_attention import PackedAttention
from megatron_patches.model.latent import is_latent
from megatron_patches.model.model_options import MEGATRONS, ModelOptions
from megatron_patches.patches.gpt_forward import PatchedForward
from megatron_patches.patches.norms import KeyWidthNorm, QueryWidthNorm, norm_class
from megatron_patches.patches.position_rotary import PositionRotary
from megatron_patches.support.config_fields import LIMITS, check_config
from megatron_patches.support.layer_spec import name_of
from megatron_patches.support.limits import Limit, check_limit

SERVED_ARGUMENTS_BY = {
    "checks of the configuration, modules and groups": "config transformer_layer_spec pg_collection",
    "megatron's modules": """
        vocab_size max_sequence_length pre_process post_process share_embeddings_and_output_weights""",
    "no code, since the loss is computed from each tensor-parallel rank's part of the logits": "parallel_output",
    "this project's RoPE, which takes frequencies and interpolation from megatron's embedding": """
        rotary_base rotary_percent rope_scaling rope_scaling_factor seq_len_interpolation_factor""",
}
"""Arguments of GPTModel for which :data:`ARGUMENTS` has no limit. The key names the code that reads or checks them, or
says why no code does."""
SERVED_ARGUMENTS = {*" ".join(SERVED_ARGUMENTS_BY.values()).split()}

ARGUMENTS = {
    "position_embedding_type": Limit("only RoPE is supported", ("rope",)),
    "mtp_block_spec": Limit("only the next token is predicted", (None,)),
    "vp_stage": Limit("a rank has one pipeline stage", (None,)),
    "fp16_lm_cross_entropy": Limit("losses are computed in float32", (False,)),
    "scatter_embedding_sequence_parallel": Limit("with sequence_parallel, layers get only this rank's tokens", (True,)),
}
"""Arguments of GPTModel of which not all values are supported, with the reason and the supported values."""


def check_bare(model: Any, pattern: str = "") -> None:
    """Refuses a model of another class than CAD was made for, such as a wrapped model, and a model attached already.

    Args:
        pattern: the ``hybrid_layer_pattern`` of the user's CAD, for a HybridModel; empty for a GPTModel.

    Raises:
        SupportError: the message names the model's class, or says that the model is attached already.
    """
    if pattern:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        if not isinstance(model, HybridModel):
            raise SupportError(
                f"The model is a {type(model).__module__}.{type(model).__name__}, but CAD was made with "
                f"hybrid_layer_pattern {pattern!r}: attach a HybridModel, or leave the pattern out."
            )
    elif not isinstance(model, GPTModel):
        raise SupportError(
            f"The model is a {type(model).__module__}.{type(model).__name__}, but only a GPTModel is supported, or a "
            "HybridModel with a CAD that was given its hybrid_layer_pattern: attach the model as built, before "
            "CAD.data_parallel, torch.compile or anything else wraps it."
        )
    if isinstance(model, PatchedForward):
        raise SupportError("The model is attached already: call CAD.attach once.")


def check_model(
    model: GPTModel, layer: type[TransformerLayer] = SplitTransformerLayer, options: ModelOptions = MEGATRONS
) -> None:
    """Refuses a GPTModel that was built with an argument or a module that is not supported.

    Args:
        model: the model as it was built. Only its rotary embedding may have been replaced, by a PositionRotary.
        layer: the class that every layer must have. With the default, a layer must have the class that ``layer_class``
            returns for it.
        options: the model's options for which Megatron's configuration has no field.

    Raises:
        SupportError: an argument or a module is not supported; the message names the first.
    """
    check_config(model.config)
    for name, limit in ARGUMENTS.items():
        check_limit(name, argument_of(model, name), limit)
    check_model_groups(model)
    if not is_latent(model.config) and not isinstance(model.rotary_pos_emb, PositionRotary):
        expect("rotary_pos_emb", type(model.rotary_pos_emb), RotaryEmbedding)
    expect("decoder", type(model.decoder), TransformerBlock)
    if model.decoder.final_layernorm is not None:
        norm = norm_class(model.config, options.norm_bias)
        expect("decoder.final_layernorm", type(model.decoder.final_layernorm), norm)
    found, due = len(model.decoder.layers), model.config.num_layers // model.config.pipeline_model_parallel_size
    if found != due:
        raise SupportError(
            f"decoder has {found} layers, but num_layers and pipeline_model_parallel_size of the configuration give "
            f"each pipeline stage {due}, and plans are for these: set num_layers to the number that the model has."
        )
    before = due * parallel_state.get_pipeline_model_parallel_rank()
    for number, each in enumerate(model.decoder.layers):
        if each.layer_number != before + number + 1:
            raise SupportError(
                f"decoder.layers.{number} was built as layer {each.layer_number} of the model, but is at the place of "
                f"layer {before + number + 1}, whose window and sinks it would get: leave layers in their order."
            )
        expected = layer_class(model.config, each.layer_number) if layer is SplitTransformerLayer else layer
        expect(f"decoder.layers.{number}", type(each), expected)
        _check_layer(f"decoder.layers.{number}", each, model.config, options)
    if model.post_process:
        expect("output_layer", type(model.output_layer), ColumnParallelLinear)


def argument_of(model: Any, name: str) -> Any:
    """Returns the value that the argument ``name`` had when ``model`` was built.

    ``scatter_embedding_sequence_parallel`` counts as True on a pipeline stage without embedding.
    """
    embedding = model.embedding if model.pre_process else None
    if name == "scatter_embedding_sequence_parallel":
        return embedding is None or embedding.scatter_to_sequence_parallel
    if name == "position_embedding_type" and embedding is not None and embedding.add_position_embedding:
        return "learned_absolute"  # with "rope" the embedding has no position weights
    return getattr(model, name)


def check_model_groups(model: Any) -> None:
    """Raises SupportError if a model's tensor-parallel or pipeline group is not that of ``parallel_state``."""
    ours = {
        "tp": parallel_state.get_tensor_model_parallel_group(check_initialized=False),
        "pp": parallel_state.get_pipeline_model_parallel_group(check_initialized=False),
    }
    for name, group in ours.items():
        if getattr(model.pg_collection, name) is not group:
            raise SupportError(
                f"pg_collection has a {name} group of its own, but core attention is spread over the groups of "
                "megatron's parallel_state: build the model without pg_collection."
            )


def _check_layer(path: str, layer: Any, config: TransformerConfig, options: ModelOptions) -> None:
    attention, mlp = layer.self_attention, layer.mlp
    norm = norm_class(config, options.norm_bias)
    expected = {
        "input_layernorm": IdentityOp if options.norms == "post" else norm,
        "pre_cross_attn_layernorm": IdentityOp,
        "cross_attention": IdentityOp,
        "pre_mlp_layernorm": IdentityOp if options.norms == "post" or options.parallel_mlp else norm,
    }
    recurrent = isinstance(layer, SplitRecurrentLayer)
    latent = is_latent(config)
    column, row = linears_like(
        attention.in_proj if recurrent else attention.linear_kv_up_proj if latent else attention.linear_qkv
    )
    projection = with_bias(row) if options.attention_output_bias else row
    if recurrent:
        mixer = {"in_proj": column, "out_norm": norm, "out_proj": row}
    elif latent:
        expected["self_attention"] = LatentAttention
        mixer = _latent_parts(config, column, row, norm)
    else:
        expected["self_attention"] = SelfAttention
        mixer = {"core_attention": PackedAttention, "linear_qkv": column, "linear_proj": projection}
    expected |= {f"self_attention.{name}": kind for name, kind in mixer.items()}
    if options.mlp_bias:
        column, row = with_bias(column), with_bias(row)
    if has_experts(config)[layer.layer_number - 1]:
        expected |= {"mlp": MoELayer, "mlp.router": TopKRouter, "mlp.experts": DrawnExperts}
        if config.moe_shared_expert_intermediate_size is not None:
            expected["mlp.shared_experts"] = SharedExpertMLP
    else:
        expected |= {"mlp": MLP, "mlp.linear_fc1": column, "mlp.linear_fc2": row}
    for name, kind in expected.items():
        expect(f"{path}.{name}", type(layer.get_submodule(name)), kind)
    if not recurrent and not latent:
        check_head_norms(path, attention, config, options)
    if isinstance(layer, SplitTransformerLayer):
        check_options(path, layer, options)
    for name in ("self_attn_bda", "mlp_bda"):
        expect(f"{path}.{name}", getattr(layer, name), get_bias_dropout_add)
    check_limit(f"{path}.hidden_dropout", layer.hidden_dropout, LIMITS["hidden_dropout"])
    if any(part.config is not config for part in (layer, attention, mlp)):
        raise SupportError(f"{path} has a configuration of its own, but {LIMITS['heterogeneous_block_specs'].because}.")


def _latent_parts(config: Any, column: Any, row: Any, norm: Any) -> dict[str, Any]:
    norm = norm if config.qk_layernorm else WholeRows
    parts = {
        "linear_kv_down_proj": ReplicatedLinear,
        "kv_layernorm": norm,
        "linear_kv_up_proj": column,
        "core_attention": PackedAttention,
        "linear_proj": row,
        "rotary_pos_emb": RotaryEmbedding if config.rope_type == "rope" else YarnRotaryEmbedding,
    }
    if config.q_lora_rank is None:
        return {**parts, "linear_q_proj": column}
    return {**parts, "linear_q_down_proj": ReplicatedLinear, "q_layernorm": norm, "linear_q_up_proj": column}


def check_options(path: str, layer: Any, options: ModelOptions) -> None:
    """Raises SupportError if a layer of this project was built with other model options than ``options``."""
    if layer.options != options:
        raise SupportError(
            f"{path} was built with other model options than CAD has: build the model with this CAD's block_spec or "
            "hybrid_stack_spec."
        )


def check_head_norms(path: str, attention: Any, config: TransformerConfig, options: ModelOptions) -> None:
    """Raises SupportError unless norms of queries and keys are as ``config`` and ``options`` ask."""
    norm = norm_class(config, options.norm_bias)
    head_norms = (norm, norm) if options.query_key_norm == "head" else (QueryWidthNorm, KeyWidthNorm)
    for name, wanted in zip(("q_layernorm", "k_layernorm"), head_norms, strict=True):
        found = getattr(attention, name)
        if type(found) not in ((wanted,) if config.qk_layernorm else (IdentityOp, type(None))):
            raise SupportError(
                f"qk_layernorm is {config.qk_layernorm}, but {path}.self_attention.{name} is a "
                f"{type(found).__name__}: give the layer spec and the configuration the same qk_layernorm, "
                "and build the model with this CAD's block_spec or hybrid_stack_spec."
            )


def linears_like(linear: Any) -> tuple[type, type]:
    """Returns the classes of column-parallel and row-parallel layers in a model with the layer ``linear``."""
    if type(linear).__module__ == "megatron_patches.te.linears":
        from megatron_patches.te.linears import ColumnLinear, RowLinear

        return ColumnLinear, RowLinear
    return ColumnParallelLinear, RowParallelLinear


def expect(path: str, found: Any, wanted: type | Callable[..., Any]) -> None:
    """Raises SupportError if ``found`` is not ``wanted``. ``path`` is the place in the model."""
    if found is not wanted:
        raise SupportError(
            f"{path} is a {found.__module__}.{name_of(found)}, but only {wanted.__module__}.{name_of(wanted)} is "
            "supported there: build the model with the spec that CAD returns, and replace no module of the model."
        )
