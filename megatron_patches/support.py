"""What core attention disaggregation serves of megatron-core, and the refusal of everything else.

Layers, block, norms and loss are replaced. Whatever would have changed what the replaced parts compute, and is not
honoured by their replacements, is refused before work starts; nothing is dropped silently. So every field of
megatron's configuration that is set away from its default has to be in a table here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from distca.errors import SupportError
from megatron_patches.layer import SplitTransformerLayer
from megatron_patches.packed_attention import PackedAttention
from megatron_patches.patches.position_rotary import PositionRotary
from megatron_patches.patches.rms_norm import RMSNorm

_SERVED_BY = {
    "megatron's own linear layers, embedding and MLP, which stay": """
        num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels add_bias_linear
        add_qkv_bias gated_linear_unit activation_func activation_func_fp8_input_store glu_linear_offset
        activation_func_clamp_value bias_activation_fusion bias_dropout_fusion init_method output_layer_init_method
        init_method_std embedding_init_method embedding_init_method_std perform_initialization use_cpu_initialization
        gradient_accumulation_fusion async_tensor_model_parallel_allreduce clone_scatter_output_in_embedding
        tensor_model_parallel_size sequence_parallel disable_bf16_reduced_precision_matmul bf16
        hetereogenous_dist_checkpoint""",
    "our layers and the core-attention servers": """
        softmax_scale qk_layernorm layernorm_epsilon""",
    # They choose among implementations, precisions and fusions of what is replaced, never what it computes.
    "a replacement, which has its own way of computing the same": """
        attention_backend flash_attention_version attention_softmax_in_fp32 masked_softmax_fusion apply_rope_fusion
        fused_single_qkv_rope persist_layer_norm memory_efficient_layer_norm cross_entropy_loss_fusion
        cross_entropy_fusion_impl""",
    "megatron's schedules, optimizer and checkpoints, or ours in their place": """
        pipeline_model_parallel_size pipeline_model_parallel_comm_backend pipeline_dtype variable_seq_lengths
        overlap_p2p_comm overlap_p2p_comm_warmup_flush batch_p2p_comm batch_p2p_sync
        use_ring_exchange_p2p deallocate_pipeline_outputs timers barrier_with_L1_time finalize_model_grads_func
        grad_scale_func no_sync_func grad_sync_func param_sync_func use_te_rng_tracker""",
    "nobody in training": """
        flash_decode inference_rng_tracker inference_sampling_seed mlp_chunks_for_prefill nccl_all_reduce_for_prefill
        inference_disable_triton_nvls_kernels inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels
        inference_moe_token_dispatcher_type moe_pad_experts_for_cuda_graph_inference symmetric_ar_type""",
    "Transformer Engine's linear layers": """
        fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad tp_only_amax_red
        disable_parameter_transpose_cache""",
    "Transformer Engine's linear layers, while tp_comm_overlap is off": """
        tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
        tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend""",
}


@dataclasses.dataclass(frozen=True)
class _Limit:
    """A field or argument that is served for some values only.

    Attributes:
        because: why not for others; goes on after "is ..., but".
        served: the values; the first one is proposed.
        inert: fields that nobody reads while this one has a served value.
    """

    because: str
    served: tuple[Any, ...]
    inert: str = ""


_NO_EXPERTS = "there are no mixtures of experts here"
_NO_GRAPHS = "exchanges with the core-attention servers cannot be captured in CUDA graphs"
_SENDS_TWICE = "tensors that are exchanged with the servers are not offloaded"
_EQUAL_STAGES = "all stages have equally many layers"
_TRANSFORMER_ENGINE = "of Transformer Engine's modules only the linear layers are served"

_LIMITS = {
    # Core attention
    "window_size": _Limit("every token attends to its whole document up to itself", (None,), "window_attn_skip_freq"),
    "softmax_type": _Limit("attention sinks are not served", ("vanilla",)),
    "attention_dropout": _Limit("core attention has no dropout", (0.0,)),
    "apply_query_key_layer_scaling": _Limit("scores are computed in float32 in any case", (False,)),
    "attention_output_gate": _Limit("the output of core attention has no gate", (False,)),
    "qk_l2_norm": _Limit("the norms of query and key heads are RMSNorms (qk_layernorm)", (False,)),
    "qk_clip": _Limit(
        "the largest score is not known where it would be clipped", (False,), "qk_clip_alpha qk_clip_threshold"
    ),
    "log_max_attention_logit": _Limit("the largest score is not known outside of the servers", (False,)),
    "multi_latent_attention": _Limit(
        "only self attention with query groups is served", (False,), "mla_down_proj_fusion cache_mla_latents"
    ),
    "experimental_attention_variant": _Limit(
        "only softmax attention is served",
        (None,),
        """experimental_attention_variant_loss_scale_func dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
        dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_indexer_topk_freq dsa_indexer_skip_topk_offset
        dsa_kernel_backend dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
        dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 linear_conv_kernel_dim linear_key_head_dim
        linear_value_head_dim linear_num_key_heads linear_num_value_heads""",
    ),
    "linear_attention_freq": _Limit("only softmax attention is served", (None,)),
    "is_hybrid_model": _Limit(
        "only transformer layers are served",
        (False,),
        """mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path
        mamba_training_ssm_states_dtype""",
    ),
    "context_parallel_size": _Limit(
        "core attention disaggregation itself spreads sequences over data-parallel ranks",
        (1,),
        "cp_comm_type hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank",
    ),
    "hybrid_context_parallel": _Limit("core attention disaggregation itself spreads sequences over ranks", (False,)),
    # Positions
    "rotary_interleaved": _Limit("RoPE rotates the two halves of a head", (False,)),
    "no_rope_freq": _Limit("RoPE rotates the heads of every layer", (None,)),
    "mrope_section": _Limit("a token has one position", (None,)),
    # Layer and block
    "normalization": _Limit("norms are RMSNorms", ("RMSNorm",)),
    "layernorm_zero_centered_gamma": _Limit("the norms' weights are factors as they are", (False,)),
    "hidden_dropout": _Limit("layers have no dropout", (0.0,)),
    "fp32_residual_connection": _Limit("the residual has the type of the layers' output", (False,)),
    "apply_residual_connection_post_layernorm": _Limit("the residual is what comes before the norm", (False,)),
    "test_mode": _Limit("megatron's own checks of query, key and value are not run", (False,)),
    "mlp_chunks_for_training": _Limit("a layer's MLP takes all rows at once", (1,)),
    "heterogeneous_block_specs": _Limit("all layers have the same configuration", (False,)),
    "use_mup": _Limit(
        "the loss does not scale logits",
        (False,),
        """mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim
        mup_attn_scale_power""",
    ),
    "mtp_num_layers": _Limit(
        "only the next token is predicted",
        (None,),
        """mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads mtp_hybrid_override_pattern mtp_standalone
        mtp_grad_scale_func""",
    ),
    "num_moe_experts": _Limit(
        _NO_EXPERTS,
        (None,),
        """moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap moe_layer_freq
        moe_ffn_hidden_size moe_router_load_balancing_type moe_router_topk moe_enable_routing_replay
        moe_router_topk_limited_devices moe_router_padding_for_quantization moe_router_padding_for_fp8
        moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor
        moe_router_score_function moe_router_dtype moe_router_enable_expert_bias moe_router_bias_update_rate
        moe_router_force_load_balancing moe_router_quantile_balancing_ema moe_router_force_biased moe_grouped_gemm
        moe_use_legacy_grouped_gemm moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_token_dropping
        moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend moe_per_layer_logging
        moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_layer_recompute
        moe_permute_fusion moe_router_fusion moe_apply_probs_on_input moe_latent_size moe_deepep_num_sms
        moe_hybridep_num_sms moe_extended_tp moe_grad_scale_func moe_shared_expert_glu_interleave_size
        moe_single_grouped_weight moe_single_grouped_bias moe_permute_fusion_into_hybridep
        moe_hybridep_pad_uneven_dispatch_inputs moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute
        moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape
        moe_ncclep_zero_copy moe_mlp_glu_interleave_size moe_expert_rank_capacity_factor
        use_fused_weighted_squared_relu use_grouped_gemm_for_shared_expert expert_tensor_parallel_size
        overlap_dispatch_backward_with_experts_wgrad expert_tensor_parallel_num_weight_shards
        expert_gtp_weight_remat_size""",
    ),
    "moe_paged_stash": _Limit(
        _NO_EXPERTS,
        (False,),
        """moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
        moe_paged_stash_buffer_size_factor_cpu""",
    ),
    "expert_model_parallel_size": _Limit(_NO_EXPERTS, (1,)),
    "overlap_moe_expert_parallel_comm": _Limit(
        _NO_EXPERTS, (False,), "ep_overlap_early_attn_memory_release high_priority_a2a_comm_stream"
    ),
    # Precision
    "params_dtype": _Limit(
        "no other types are trained with",
        (torch.bfloat16, torch.float32, torch.float64),
    ),
    "fp16": _Limit("losses are not scaled for float16", (False,)),
    "enable_autocast": _Limit("activations have the type of the parameters", (False,), "autocast_dtype"),
    "fp8": _Limit("other formats than these are not served", (None, "hybrid", "e4m3")),
    "fp8_recipe": _Limit(
        "the linear layers scale by whole tensors or by blocks of 128",
        ("delayed", "tensorwise", "blockwise"),
        "fp8_quantizer_factory",
    ),
    "fp8_param": _Limit("the layers keep their weights in bfloat16 beside their FP8 copies", (False,)),
    "fp8_dot_product_attention": _Limit("core attention is computed in bfloat16", (False,)),
    "fp8_multi_head_attention": _Limit("core attention is computed in bfloat16", (False,)),
    "fp8_output_proj": _Limit("the output layer is computed together with the loss", (False,)),
    "first_last_layers_bf16": _Limit(
        "all layers have the same precision", (False,), "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"
    ),
    "tp_comm_overlap": _Limit("tensor-parallel transfers do not go by Transformer Engine's user buffers", (False,)),
    "fp4": _Limit("there is no FP4 here", (None,), "fp4_recipe fp4_param fp4_quantizer_factory"),
    "quant_recipe": _Limit("weights and activations are not quantized", (None,)),
    "use_kitchen": _Limit(
        "only megatron's own linear layers are served", (False,), "use_kitchen_attention kitchen_attention_backend"
    ),
    "deterministic_mode": _Limit(
        "it does not reach the core-attention kernel, which has a setting of its own", (False,)
    ),
    "batch_invariant_mode": _Limit("core-attention kernels do not know of it", (False,)),
    # Loss
    "calculate_per_token_loss": _Limit(
        "ranks hold different numbers of tokens, whose losses are added up and divided once by all tokens", (True,)
    ),
    "defer_embedding_wgrad_compute": _Limit(
        "the output layer is computed together with the loss", (False,), "wgrad_deferral_limit"
    ),
    "config_logger_dir": _Limit("the inputs and logits that it logs are not there", ("",)),
    # Memory
    "recompute_granularity": _Limit(
        "core attention is never recomputed; recompute_segments recomputes everything else",
        (None, "selective"),
        "recompute_method recompute_num_layers distribute_saved_activations",
    ),
    "num_microbatches_with_partial_activation_checkpoints": _Limit("all micro-batches recompute the same", (None,)),
    "cpu_offloading": _Limit(
        _SENDS_TWICE,
        (False,),
        """cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations cpu_offloading_weights
        cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers""",
    ),
    "fine_grained_activation_offloading": _Limit(
        _SENDS_TWICE,
        (False,),
        """offload_modules min_offloaded_tensor_size delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks
        activation_offload_fraction fine_grained_offloading_max_inflight_offloads""",
    ),
    "gtp_weight_remat_size": _Limit(
        "weights are sharded over tensor-parallel ranks only", (1,), "tensor_parallel_num_weight_shards"
    ),
    "init_model_with_meta_device": _Limit("weights are drawn where the model is built", (False,)),
    # Flow
    "virtual_pipeline_model_parallel_size": _Limit(
        "a rank has one pipeline stage", (None,), "microbatch_group_size_per_vp_stage"
    ),
    "pipeline_model_parallel_layout": _Limit(_EQUAL_STAGES, (None,)),
    "num_layers_in_first_pipeline_stage": _Limit(_EQUAL_STAGES, (None,)),
    "num_layers_in_last_pipeline_stage": _Limit(_EQUAL_STAGES, (None,)),
    "account_for_embedding_in_pipeline_split": _Limit(_EQUAL_STAGES, (False,)),
    "account_for_loss_in_pipeline_split": _Limit(_EQUAL_STAGES, (False,)),
    "cuda_graph_impl": _Limit(
        _NO_GRAPHS,
        ("none",),
        """cuda_graph_scope cuda_graph_modules cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
        cuda_graph_warmup_steps inference_cuda_graph_scope""",
    ),
    "enable_cuda_graph": _Limit(_NO_GRAPHS, (False,)),
    "external_cuda_graph": _Limit(_NO_GRAPHS, (False,)),
    "transformer_impl": _Limit("layers built for inference are not trained", ("local", "transformer_engine")),
    "use_inference_optimized_layers": _Limit("layers built for inference are not trained", (False,)),
    "inference_fuse_tp_communication": _Limit("layers built for inference are not trained", (False,)),
    "use_te_activation_func": _Limit(_TRANSFORMER_ENGINE, (False,)),
    "fused_residual_rmsnorm": _Limit(_TRANSFORMER_ENGINE, (False,)),
    "use_transformer_engine_op_fuser": _Limit(_TRANSFORMER_ENGINE, (False,)),
    "use_grouped_gemm_for_dense_mlp": _Limit(_TRANSFORMER_ENGINE, (False,)),
    "delay_wgrad_compute": _Limit("weight gradients are computed in backward", (False,)),
}

# Named beside _LIMITS because values of two fields count.
_CHECKED_TOGETHER = {"recompute_modules"}

_SERVED = {
    *" ".join(_SERVED_BY.values()).split(),
    *" ".join(limit.inert for limit in _LIMITS.values()).split(),
    *_CHECKED_TOGETHER,
}


def check_config(config: TransformerConfig) -> None:
    """Refuse what a configuration asks for and would not get.

    Args:
        config: the configuration that a model is built with, or was.

    Raises:
        SupportError: the first field with a value that is not served, or that is not known here and not at its
            default.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in _LIMITS:
            _check_limit(field.name, value, _LIMITS[field.name])
        elif field.name not in _SERVED and not _is_default(field, value):
            raise SupportError(
                f"{field.name} is {value!r}, but core attention disaggregation does not know this field of "
                f"{type(config).__name__}: leave it at its default."
            )
    check_recomputation(config)
    if config.num_query_groups < config.tensor_model_parallel_size:
        raise SupportError(
            f"num_query_groups is {config.num_query_groups}, fewer than tensor_model_parallel_size "
            f"{config.tensor_model_parallel_size}, but a rank has whole query groups: set tensor_model_parallel_size "
            f"to {config.num_query_groups} or less."
        )


def check_recomputation(config: TransformerConfig, recompute_segments: bool = False) -> None:
    """Refuse to recompute core attention, or MLPs twice.

    Args:
        config: the configuration of a model.
        recompute_segments: everything but core attention is recomputed as a whole.

    Raises:
        SupportError: something but MLPs is recomputed, or these a second time.
    """
    if config.recompute_granularity is None:
        return
    _check_limit("recompute_granularity", config.recompute_granularity, _LIMITS["recompute_granularity"])
    if config.recompute_modules != ["mlp"]:
        raise SupportError(
            f"recompute_modules is {config.recompute_modules}, but the MLPs are all that is recomputed by itself: set "
            "it to ['mlp'], or leave recompute_granularity unset and set recompute_segments to recompute everything "
            "but core attention."
        )
    if recompute_segments:
        raise SupportError(
            "recompute_modules is ['mlp'], but recompute_segments recomputes the MLPs too: leave "
            "recompute_granularity unset, or do without recompute_segments."
        )


def _check_limit(name: str, value: Any, limit: _Limit) -> None:
    if value not in limit.served:
        raise SupportError(f"{name} is {value!r}, but {limit.because}: set it to {_alternatives(limit.served)}.")


def _alternatives(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(value) for value in values)


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return field.default is not dataclasses.MISSING and bool(value == field.default)


# Arguments of GPTModel that its configuration does not hold.

_SERVED_ARGUMENTS_BY = {
    "checks of their own": "config transformer_layer_spec pg_collection",
    "megatron's modules": """
        vocab_size max_sequence_length pre_process post_process share_embeddings_and_output_weights""",
    "the loss, which takes the ranks' shares of the logits in either case": "parallel_output",
    "the angles of RoPE, from the frequencies and the interpolation of megatron's embedding": """
        rotary_base rope_scaling rope_scaling_factor seq_len_interpolation_factor""",
}
_SERVED_ARGUMENTS = {*" ".join(_SERVED_ARGUMENTS_BY.values()).split()}

_ARGUMENTS = {
    "position_embedding_type": _Limit("RoPE is all that is served", ("rope",)),
    "rotary_percent": _Limit("RoPE rotates all of a head", (1.0,)),
    "mtp_block_spec": _Limit("only the next token is predicted", (None,)),
    "vp_stage": _Limit("a rank has one pipeline stage", (None,)),
    "fp16_lm_cross_entropy": _Limit("losses are computed in float32", (False,)),
    "scatter_embedding_sequence_parallel": _Limit("a layer's input is this rank's share of the rows", (True,)),
}


def check_model(model: GPTModel, layer: type[TransformerLayer] = SplitTransformerLayer) -> None:
    """Refuse what a model was built with, beyond its configuration, and would not get.

    Args:
        model: a GPTModel as built: nothing of it replaced yet.
        layer: class of its layers; Megatron's own where core attention stays at home.

    Raises:
        SupportError: the first argument or module that is not served.
    """
    check_config(model.config)
    for name, limit in _ARGUMENTS.items():
        _check_limit(name, _argument(model, name), limit)
    _check_groups(model)
    if not isinstance(model.rotary_pos_emb, PositionRotary):
        _expect("rotary_pos_emb", type(model.rotary_pos_emb), RotaryEmbedding)
    _expect("decoder", type(model.decoder), TransformerBlock)
    if model.decoder.final_layernorm is not None:
        _expect("decoder.final_layernorm", type(model.decoder.final_layernorm), RMSNorm)
    for number, each in enumerate(model.decoder.layers):
        _expect(f"decoder.layers.{number}", type(each), layer)
        _check_layer(f"decoder.layers.{number}", each, model.config)
    if model.post_process:
        _expect("output_layer", type(model.output_layer), ColumnParallelLinear)


def _argument(model: GPTModel, name: str) -> Any:
    """What ``model`` was built with, as far as its modules tell."""
    embedding = model.embedding if model.pre_process else None
    if name == "scatter_embedding_sequence_parallel":
        return embedding is None or embedding.scatter_to_sequence_parallel
    if name == "position_embedding_type" and embedding is not None and embedding.add_position_embedding:
        return "learned_absolute"  # where the configuration has another type, the embedding does not read it
    return getattr(model, name)


def _check_groups(model: GPTModel) -> None:
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


def _check_layer(path: str, layer: Any, config: TransformerConfig) -> None:
    attention, mlp = layer.self_attention, layer.mlp
    expected = {
        "input_layernorm": RMSNorm,
        "self_attention": SelfAttention,
        "self_attention.core_attention": PackedAttention,
        "pre_cross_attn_layernorm": IdentityOp,
        "cross_attention": IdentityOp,
        "pre_mlp_layernorm": RMSNorm,
        "mlp": MLP,
    }
    column, row = _linears_like(attention.linear_qkv)
    expected |= {"self_attention.linear_qkv": column, "self_attention.linear_proj": row}
    expected |= {"mlp.linear_fc1": column, "mlp.linear_fc2": row}
    for name, served in expected.items():
        _expect(f"{path}.{name}", type(layer.get_submodule(name)), served)
    head_norms = (RMSNorm,) if config.qk_layernorm else (IdentityOp, type(None))
    for name in ("q_layernorm", "k_layernorm"):
        found = getattr(attention, name)
        if type(found) not in head_norms:
            raise SupportError(
                f"qk_layernorm is {config.qk_layernorm}, but {path}.self_attention.{name} is a "
                f"{type(found).__name__}: give the layer spec and the configuration the same qk_layernorm."
            )
    for name in ("self_attn_bda", "mlp_bda"):
        _expect(f"{path}.{name}", getattr(layer, name), get_bias_dropout_add)
    _check_limit(f"{path}.hidden_dropout", layer.hidden_dropout, _LIMITS["hidden_dropout"])
    if any(part.config is not config for part in (layer, attention, mlp)):
        raise SupportError(
            f"{path} has a configuration of its own, but {_LIMITS['heterogeneous_block_specs'].because}."
        )


def _linears_like(linear: Any) -> tuple[type, type]:
    """A layer has linear layers of one kind, Megatron's own or Transformer Engine's: split by outputs, by inputs."""
    if type(linear).__module__ == "megatron_patches.te.linears":
        from megatron_patches.te.linears import ColumnLinear, RowLinear

        return ColumnLinear, RowLinear
    return ColumnParallelLinear, RowParallelLinear


def check_layer_spec(spec: ModuleSpec) -> None:
    """Refuse a layer spec whose modules our layers would not run as they are meant.

    Args:
        spec: a transformer layer's, as megatron's get_gpt_layer_local_spec gives it, or its
            get_gpt_layer_with_transformer_engine_spec, whose linear layers hold norms that our layers run themselves.

    Raises:
        SupportError: the first module that is not served.
    """
    if not isinstance(spec, ModuleSpec):
        raise SupportError(
            f"the layer spec is a {type(spec).__name__}, but one ModuleSpec of all layers is needed{_LOCAL}"
        )
    _expect_in_spec("module", spec.module, TransformerLayer, SplitTransformerLayer)
    parts = spec.submodules
    for name in ("pre_cross_attn_layernorm", "cross_attention"):
        _expect_in_spec(name, getattr(parts, name), IdentityOp)
    _expect_in_spec("cross_attn_bda", parts.cross_attn_bda, IdentityFuncOp)
    for name in ("self_attn_bda", "mlp_bda"):
        _expect_in_spec(name, getattr(parts, name), get_bias_dropout_add)
    attention = parts.self_attention
    _expect_in_spec("self_attention", _module(attention), SelfAttention)
    mask = attention.params.get("attn_mask_type")
    if mask is not AttnMaskType.causal:
        raise SupportError(f"attn_mask_type of the layer spec is {mask}, but only causal attention is served{_LOCAL}")
    heads = attention.submodules
    cores = (DotProductAttention, PackedAttention, TEDotProductAttention)
    _expect_in_spec("self_attention.core_attention", heads.core_attention, *cores)
    for name in ("q_layernorm", "k_layernorm"):
        served = (IdentityOp, WrappedTorchNorm, RMSNorm, TENorm)
        _expect_in_spec(f"self_attention.{name}", getattr(heads, name), *served)
    _expect_in_spec("mlp", _module(parts.mlp), MLP)
    linears = mlp_submodules(parts.mlp)
    _expect_norm_and_linear(parts, "input_layernorm", "self_attention.linear_qkv", heads.linear_qkv)
    _expect_norm_and_linear(parts, "pre_mlp_layernorm", "mlp.linear_fc1", linears.linear_fc1)
    _expect_in_spec("self_attention.linear_proj", heads.linear_proj, RowParallelLinear, TERowParallelLinear)
    _expect_in_spec("mlp.linear_fc2", linears.linear_fc2, RowParallelLinear, TERowParallelLinear)


def has_te_linears(spec: ModuleSpec) -> bool:
    """Whether the linear layers of a served layer spec are Transformer Engine's."""
    linear = spec.submodules.self_attention.submodules.linear_qkv
    return linear in (TEColumnParallelLinear, TELayerNormColumnParallelLinear)


def mlp_submodules(spec: Any) -> Any:
    """The linear layers in the spec of an MLP, in which they may be replaced."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def _expect_norm_and_linear(parts: Any, norm: str, path: str, linear: Any) -> None:
    """Each norm once: by itself or in the linear layer behind it. Ours are by themselves."""
    found = getattr(parts, norm)
    if linear is TELayerNormColumnParallelLinear and found is IdentityOp:
        return
    _expect_in_spec(path, linear, ColumnParallelLinear, TEColumnParallelLinear)
    _expect_in_spec(norm, found, WrappedTorchNorm, RMSNorm, TENorm)


_LOCAL = ": give the spec of megatron's get_gpt_layer_local_spec(normalization='RMSNorm')."


def _module(spec: Any) -> Any:
    """The class that a spec builds: of a ModuleSpec, or of the partial of a class method that later versions have."""
    if isinstance(spec, functools.partial):
        return getattr(spec.func, "__self__", spec.func)
    return spec.module if isinstance(spec, ModuleSpec) else spec


def _expect_in_spec(path: str, found: Any, *served: Any) -> None:
    if found not in served:
        twice = ", whose norm would be applied twice" if "LayerNormColumn" in _name(found) else ""
        raise SupportError(
            f"{path} of the layer spec is {_name(found)}{twice}, but {_name(served[0])} is what is served there{_LOCAL}"
        )


def _expect(path: str, found: Any, served: type | Callable[..., Any]) -> None:
    if found is not served:
        raise SupportError(
            f"{path} is a {found.__module__}.{_name(found)}, but only {served.__module__}.{_name(served)} is served "
            "there: build the model with the layer spec of core attention disaggregation, and replace no module of it."
        )


def _name(found: Any) -> str:
    return str(getattr(_module(found), "__name__", found))
