"""Says which values of each field of Megatron's TransformerConfig are supported.

``experts.py`` lists fields that only models with experts read, and this file lists all others. A field that neither
lists is from an unknown version of Megatron or from a subclass, and must have its default.

Attention servers are ranks that compute core attention for other ranks. ``CAD`` is ``distca.CAD``, the object that
training scripts make.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from distca.errors import SupportError
from distca.sizes.head_dims import unserved
from megatron_patches.model.latent import is_latent
from megatron_patches.support.experts import EXPERT_FIELDS, check_experts
from megatron_patches.support.limits import Limit, check_limit

# Fields without a limit in ``LIMITS``. The key names the code that reads them, or says why no code does.
_SERVED_BY = {
    "Megatron's own linear layers, embedding and MLP": """
        num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels add_bias_linear
        add_qkv_bias gated_linear_unit activation_func activation_func_fp8_input_store glu_linear_offset
        activation_func_clamp_value bias_activation_fusion bias_dropout_fusion init_method output_layer_init_method
        init_method_std embedding_init_method embedding_init_method_std perform_initialization use_cpu_initialization
        gradient_accumulation_fusion async_tensor_model_parallel_allreduce clone_scatter_output_in_embedding
        tensor_model_parallel_size sequence_parallel disable_bf16_reduced_precision_matmul bf16
        hetereogenous_dist_checkpoint is_hybrid_model""",
    "DistCA's layers and the attention servers": """
        softmax_scale window_size window_attn_skip_freq qk_layernorm layernorm_epsilon layernorm_zero_centered_gamma
        no_rope_freq rotary_interleaved attention_output_gate""",
    "Megatron's latent attention with DistCA's rotary positions; no code in models without latent attention": """
        multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base
        rotary_percent rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale
        mscale_all_dim""",
    "DistCA's recurrent layers; no code in models without such layers": """
        linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
        linear_num_value_heads mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads""",
    "Megatron's embedding, initialization and configuration, and DistCA's loss": """
        use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim
        mup_attn_scale_power""",
    "no code, since DistCA's part computes the same formula in its own way": """
        attention_backend flash_attention_version attention_softmax_in_fp32 masked_softmax_fusion apply_rope_fusion
        fused_single_qkv_rope persist_layer_norm memory_efficient_layer_norm cross_entropy_loss_fusion
        cross_entropy_fusion_impl use_mamba_mem_eff_path mamba_training_ssm_states_dtype""",
    "Megatron's schedules, optimizer and checkpoints, or DistCA's in their place": """
        pipeline_model_parallel_size pipeline_model_parallel_comm_backend pipeline_dtype variable_seq_lengths
        overlap_p2p_comm overlap_p2p_comm_warmup_flush batch_p2p_comm batch_p2p_sync
        use_ring_exchange_p2p deallocate_pipeline_outputs timers barrier_with_L1_time finalize_model_grads_func
        grad_scale_func no_sync_func grad_sync_func param_sync_func use_te_rng_tracker""",
    "no code that runs in training": """
        flash_decode inference_rng_tracker inference_sampling_seed mlp_chunks_for_prefill nccl_all_reduce_for_prefill
        inference_disable_triton_nvls_kernels inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels
        inference_moe_token_dispatcher_type moe_pad_experts_for_cuda_graph_inference symmetric_ar_type""",
    "Transformer Engine's linear layers": """
        fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo tp_only_amax_red
        fp8_param disable_parameter_transpose_cache""",
    "no code, since LIMITS refuses tp_comm_overlap": """
        tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
        tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend""",
}


_OWN_EXPERTS = "tokens go to experts and back by exchanges of DistCA"
_NO_GRAPHS = "exchanges with attention servers cannot be captured in CUDA graphs"
_NOT_OFFLOADED = "tensors that are exchanged with attention servers are not offloaded"
_EQUAL_STAGES = "all stages have equally many layers"
_TRANSFORMER_ENGINE = "of Transformer Engine's modules only the linear layers are supported"

LIMITS = {
    # Core attention
    "softmax_type": Limit("attention sinks are learned, or there are none", ("vanilla", "learnable")),
    "attention_dropout": Limit("core attention has no dropout", (0.0,)),
    "apply_query_key_layer_scaling": Limit("this scaling is for float16, which is not supported", (False,)),
    "qk_l2_norm": Limit("the only norms of query and key heads are those of qk_layernorm", (False,)),
    "qk_clip": Limit(
        "clipping needs the largest score, which attention servers do not report",
        (False,),
        "qk_clip_alpha qk_clip_threshold",
    ),
    "log_max_attention_logit": Limit("attention servers do not report the largest score", (False,)),
    "mla_down_proj_fusion": Limit("latent attention projects queries apart from keys and values", (False,)),
    "cache_mla_latents": Limit("cached latents are for inference, and models are only trained here", (False,)),
    "experimental_attention_variant": Limit(
        "only softmax attention and gated delta nets are supported",
        (None, "gated_delta_net"),
        """experimental_attention_variant_loss_scale_func dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
        dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_indexer_topk_freq dsa_indexer_skip_topk_offset
        dsa_kernel_backend dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
        dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32""",
    ),
    "context_parallel_size": Limit(
        "DistCA itself spreads sequences over data-parallel ranks",
        (1,),
        "cp_comm_type hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank",
    ),
    "hybrid_context_parallel": Limit("DistCA itself spreads sequences over ranks", (False,)),
    # Positions
    "mrope_section": Limit("a token has a single position", (None,)),
    # Layer and block
    "normalization": Limit("norms are RMSNorms or LayerNorms", ("RMSNorm", "LayerNorm")),
    "hidden_dropout": Limit("layers have no dropout", (0.0,)),
    "fp32_residual_connection": Limit("the residual has the type of the parameters", (False,)),
    "apply_residual_connection_post_layernorm": Limit("the residual is taken before the norm", (False,)),
    "test_mode": Limit("DistCA's layers do not run Megatron's checks of queries, keys and values", (False,)),
    "mlp_chunks_for_training": Limit("a layer's MLP is not computed in chunks", (1,)),
    "heterogeneous_block_specs": Limit("all layers have the same configuration", (False,)),
    "mtp_num_layers": Limit(
        "only the next token is predicted",
        (None,),
        """mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads mtp_hybrid_override_pattern mtp_standalone
        mtp_grad_scale_func""",
    ),
    "moe_paged_stash": Limit(
        _OWN_EXPERTS,
        (False,),
        """moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
        moe_paged_stash_buffer_size_factor_cpu""",
    ),
    "overlap_moe_expert_parallel_comm": Limit(
        _OWN_EXPERTS, (False,), "ep_overlap_early_attn_memory_release high_priority_a2a_comm_stream"
    ),
    # Precision
    "params_dtype": Limit(
        "DistCA does not train weights of this type",
        (torch.bfloat16, torch.float32, torch.float64),
    ),
    "fp16": Limit("losses are not scaled for float16", (False,)),
    "enable_autocast": Limit("activations have the type of the parameters", (False,), "autocast_dtype"),
    "fp8": Limit("DistCA does not train with this format", (None, "hybrid", "e4m3")),
    "fp8_recipe": Limit(
        "the linear layers scale by whole tensors or by blocks of 128",
        ("delayed", "tensorwise", "blockwise"),
        "fp8_quantizer_factory",
    ),
    "fp8_wgrad": Limit("Transformer Engine computes weight gradients in FP8 in any case", (True,)),
    "fp8_dot_product_attention": Limit("core attention is not computed in FP8", (False,)),
    "fp8_multi_head_attention": Limit("core attention is not computed in FP8", (False,)),
    "fp8_output_proj": Limit("the output layer is computed together with the loss", (False,)),
    "first_last_layers_bf16": Limit(
        "all layers have the same precision", (False,), "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"
    ),
    "tp_comm_overlap": Limit("tensor-parallel transfers do not go by Transformer Engine's user buffers", (False,)),
    "fp4": Limit("there is no FP4 here", (None,), "fp4_recipe fp4_param fp4_quantizer_factory"),
    "quant_recipe": Limit("the only quantization is that of the field fp8, for all layers", (None,)),
    "use_kitchen": Limit(
        "linear layers are Megatron's or Transformer Engine's",
        (False,),
        "use_kitchen_attention kitchen_attention_backend",
    ),
    "deterministic_mode": Limit(
        "the attention kernel obeys the argument `deterministic` of distca.CAD in place of this field", (False,)
    ),
    "batch_invariant_mode": Limit("core-attention kernels do not have such a mode", (False,)),
    # Loss
    "calculate_per_token_loss": Limit(
        "ranks hold different numbers of tokens, so the sum of all losses is divided by the number of all tokens",
        (True,),
    ),
    "defer_embedding_wgrad_compute": Limit(
        "the output layer is computed together with the loss", (False,), "wgrad_deferral_limit"
    ),
    "config_logger_dir": Limit("the inputs and logits that would be logged do not exist here", ("",)),
    # Memory
    "recompute_granularity": Limit(
        "CAD(recompute='all') takes the place of full recomputation, and needs None",
        (None, "selective"),
        "recompute_method recompute_num_layers distribute_saved_activations",
    ),
    "num_microbatches_with_partial_activation_checkpoints": Limit(
        "all micro-batches recompute the same modules", (None,)
    ),
    "cpu_offloading": Limit(
        _NOT_OFFLOADED,
        (False,),
        """cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations cpu_offloading_weights
        cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers""",
    ),
    "fine_grained_activation_offloading": Limit(
        _NOT_OFFLOADED,
        (False,),
        """offload_modules min_offloaded_tensor_size delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks
        activation_offload_fraction fine_grained_offloading_max_inflight_offloads""",
    ),
    "gtp_weight_remat_size": Limit(
        "weights are sharded over tensor-parallel ranks only", (1,), "tensor_parallel_num_weight_shards"
    ),
    "init_model_with_meta_device": Limit("weights are initialized on the device on which the model is built", (False,)),
    # Pipeline stages, CUDA graphs and implementations
    "virtual_pipeline_model_parallel_size": Limit(
        "a rank has one pipeline stage", (None,), "microbatch_group_size_per_vp_stage"
    ),
    "pipeline_model_parallel_layout": Limit(_EQUAL_STAGES, (None,)),
    "num_layers_in_first_pipeline_stage": Limit(_EQUAL_STAGES, (None,)),
    "num_layers_in_last_pipeline_stage": Limit(_EQUAL_STAGES, (None,)),
    "account_for_embedding_in_pipeline_split": Limit(_EQUAL_STAGES, (False,)),
    "account_for_loss_in_pipeline_split": Limit(_EQUAL_STAGES, (False,)),
    "cuda_graph_impl": Limit(
        _NO_GRAPHS,
        ("none",),
        """cuda_graph_scope cuda_graph_modules cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
        cuda_graph_warmup_steps inference_cuda_graph_scope""",
    ),
    "enable_cuda_graph": Limit(_NO_GRAPHS, (False,)),
    "external_cuda_graph": Limit(_NO_GRAPHS, (False,)),
    "transformer_impl": Limit("layers built for inference are not trained", ("local", "transformer_engine")),
    "use_inference_optimized_layers": Limit("layers built for inference are not trained", (False,)),
    "inference_fuse_tp_communication": Limit("layers built for inference are not trained", (False,)),
    "use_te_activation_func": Limit(_TRANSFORMER_ENGINE, (False,)),
    "fused_residual_rmsnorm": Limit(_TRANSFORMER_ENGINE, (False,)),
    "use_transformer_engine_op_fuser": Limit(_TRANSFORMER_ENGINE, (False,)),
    "use_grouped_gemm_for_dense_mlp": Limit(_TRANSFORMER_ENGINE, (False,)),
    "delay_wgrad_compute": Limit("weight gradients are computed in backward", (False,)),
}
"""For each field of which some values are supported: the reason for refusing other values, and the supported values.

The last argument of a ``Limit`` names fields that no code reads while the limited field has a supported value.
"""

_CHECKED_TOGETHER = {"recompute_modules"}
"""Fields that :func:`check_recomputation` checks."""

SERVED = {
    *" ".join(_SERVED_BY.values()).split(),
    *" ".join(limit.inert for limit in LIMITS.values()).split(),
    *_CHECKED_TOGETHER,
    *EXPERT_FIELDS,
}
"""Known fields without a limit in ``LIMITS``. Other checks may still refuse some of their values."""


def check_config(config: TransformerConfig) -> None:
    """Checks all fields of a configuration.

    Raises:
        SupportError: a value is not supported, or an unknown field is not at its default; the message names one such
            field.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in LIMITS:
            check_limit(field.name, value, LIMITS[field.name])
        elif field.name not in SERVED and not _is_default(field, value):
            raise SupportError(
                f"{field.name} is {value!r}, but DistCA does not know this field of "
                f"{type(config).__name__}: leave it at its default."
            )
    check_experts(config)
    check_recomputation(config)
    if config.num_query_groups < config.tensor_model_parallel_size:
        raise SupportError(
            f"num_query_groups is {config.num_query_groups}, fewer than tensor_model_parallel_size "
            f"{config.tensor_model_parallel_size}, but a rank has whole query groups: set tensor_model_parallel_size "
            f"to {config.num_query_groups} or less."
        )
    assert config.kv_channels is not None
    if not is_latent(config) and unserved(config.kv_channels):
        raise SupportError(
            f"kv_channels is {config.kv_channels}, but rotary positions turn pairs of a head's elements: set it to an "
            "even number of at least 2."
        )


def check_types(config: TransformerConfig) -> None:
    """Checks that weights, activations and tensors between stages have one dtype.

    Raises:
        SupportError: two dtypes differ; the message names their fields.
    """
    if config.bf16 != (config.params_dtype == torch.bfloat16):
        raise SupportError(
            f"bf16 is {config.bf16} and params_dtype is {config.params_dtype}, but kernels, layers and plans use the "
            "type of the parameters: set bf16 to True with params_dtype torch.bfloat16, and to False with other types."
        )
    if config.pipeline_model_parallel_size > 1 and config.pipeline_dtype != config.params_dtype:
        raise SupportError(
            f"pipeline_dtype is {config.pipeline_dtype} and params_dtype is {config.params_dtype}, but stages exchange "
            "activations in the type of the parameters: set pipeline_dtype to the same type."
        )


def check_recomputation(config: TransformerConfig, recompute_segments: bool = False) -> None:
    """Checks ``recompute_modules``, which backward recomputes if ``recompute_granularity`` is "selective".

    Args:
        recompute_segments: whether backward recomputes everything but core attention, as ``CAD(recompute="all")`` does.

    Raises:
        SupportError: the configuration asks for full recomputation; it names no module, or another than MLPs (dense or
            with experts); or it names MLPs and ``recompute_segments`` is True.
    """
    if config.recompute_granularity is None:
        return
    check_limit("recompute_granularity", config.recompute_granularity, LIMITS["recompute_granularity"])
    alone = {"mlp", "moe"} if config.num_moe_experts else {"mlp"}
    if not config.recompute_modules or not alone.issuperset(config.recompute_modules):
        raise SupportError(
            f"recompute_modules is {config.recompute_modules}, but only MLPs, dense or with experts, are recomputed "
            f"one by one: set it to {sorted(alone)}. Or leave recompute_granularity unset and give "
            "CAD(recompute='all') to recompute everything but core attention."
        )
    if recompute_segments:
        raise SupportError(
            f"recompute_modules is {config.recompute_modules}, but CAD(recompute='all') recomputes the MLPs too: leave "
            "recompute_granularity unset, or give CAD(recompute='none')."
        )


def check_megatrons_recomputation(config: TransformerConfig) -> None:
    """Refuses MLPs with biases that Megatron's own layers would recompute: their backward would call itself forever.

    Megatron's checkpointed MLP also returns its bias. So autograd takes the checkpoint for the origin of the bias. The
    checkpoint's backward computes the bias's gradient, and for it calls itself.

    Raises:
        SupportError: ``recompute_modules`` names MLPs, and ``add_bias_linear`` is True.
    """
    if config.recompute_granularity == "selective" and config.add_bias_linear:
        raise SupportError(
            f"recompute_modules is {config.recompute_modules}, and add_bias_linear is True, but with `disaggregate` "
            "False Megatron recomputes MLPs, and with biases their backward never ends: set recompute_granularity to "
            "None, or `disaggregate` to True."
        )


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return field.default is not dataclasses.MISSING and bool(value == field.default)
