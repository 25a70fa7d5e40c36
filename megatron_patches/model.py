"""Build a LLaMA-style GPTModel: with disaggregated core attention, with packed documents at home, or stock."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from distca.attention import Kernel
from distca.runtime import AttentionPool
from distca.runtime.timeline import Timeline
from megatron_patches.block import disaggregate
from megatron_patches.layer import SplitTransformerLayer
from megatron_patches.packed_attention import PackedAttention
from megatron_patches.patches.fused_loss import fuse_loss
from megatron_patches.patches.fused_rope import fuse_rotation
from megatron_patches.patches.fused_swiglu import fuse_swiglu
from megatron_patches.patches.log_lines import drop_log_lines
from megatron_patches.patches.position_rotary import use_position_rotary
from megatron_patches.patches.rms_norm import RMSNorm
from megatron_patches.patches.wgrad_accumulation import accumulate_weight_gradients_in_products

Attention = Literal["disaggregated", "packed", "stock"]


class ModelShape(Protocol):
    """A LLaMA's sizes; distca.train.config.schema.ModelConfig is one."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def resolved_head_dim(self) -> int: ...
    @property
    def rope_base(self) -> float: ...
    @property
    def norm_epsilon(self) -> float: ...
    @property
    def tie_embeddings(self) -> bool: ...
    @property
    def init_std(self) -> float: ...


def transformer_config(
    shape: ModelShape,
    dtype: torch.dtype,
    *,
    sequence_parallel: bool = False,
    recompute_mlp: bool = False,
    cpu_initialization: bool = False,
    accumulate_in_products: bool = False,
    last_stage_layers: int | None = None,
) -> TransformerConfig:
    """megatron's configuration of the model.

    Args:
        shape: the model's sizes.
        dtype: of parameters and activations.
        sequence_parallel: shard activations between tensor-parallel blocks by tokens.
        recompute_mlp: recompute every layer's MLP in backward; the layer's own recomputation, in stock and in
            disaggregated blocks.
        cpu_initialization: draw weights on the CPU, the same for every tensor-parallel size.
        accumulate_in_products: add weight gradients to the float32 buffer of megatron's DistributedDataParallel within
            their matrix product; only for a model that is wrapped in it.
        last_stage_layers: of the last pipeline stage, where it has fewer than the others.
    """
    if accumulate_in_products:
        accumulate_weight_gradients_in_products()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.resolved_head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        init_method_std=shape.init_std,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # The loss is summed over tokens and divided once by the tokens of the whole global batch.
        calculate_per_token_loss=True,
        # megatron's stock attention needs it where packed documents are masked; ours has its own precision.
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=accumulate_in_products,
        persist_layer_norm=False,
        bias_activation_fusion=True,
        bias_dropout_fusion=False,
        tensor_model_parallel_size=tp,
        batch_p2p_sync=False,
        num_layers_in_last_pipeline_stage=last_stage_layers,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        # What a stage passed on is not kept until its backward, which needs only its place in the graph.
        deallocate_pipeline_outputs=parallel_state.get_pipeline_model_parallel_world_size() > 1,
        sequence_parallel=sequence_parallel and tp > 1,
        use_cpu_initialization=cpu_initialization,
        recompute_granularity="selective" if recompute_mlp else None,
        # Without Transformer Engine megatron-core 0.16.1 fails to recompute norms.
        recompute_modules=["mlp"] if recompute_mlp else None,
    )


def build_model(
    shape: ModelShape,
    vocabulary: int,
    config: TransformerConfig,
    attention: Attention,
    *,
    pool: AttentionPool | None = None,
    kernel: Kernel | None = None,
    timeline: Timeline | None = None,
    recompute_segments: bool = False,
) -> GPTModel:
    """Build the model on the current device.

    Args:
        shape: the model's sizes.
        vocabulary: rows of the embedding; a multiple of the tensor-parallel size.
        config: from :func:`transformer_config`.
        attention: "disaggregated": over the server pool. "packed": stock layers and block, whole documents at home.
            "stock": nothing of megatron-core replaced but the rotary embedding's positions; takes a dense mask.
        pool: for "disaggregated".
        kernel: for "packed".
        timeline: for "packed".
        recompute_segments: for "disaggregated": recompute everything but core attention in backward, and so not the
            MLP by itself.

    Returns:
        A GPTModel; its ``rotary_pos_emb`` takes the positions of each micro-batch before forward.
    """
    spec: ModuleSpec | TransformerBlockSubmodules = get_gpt_layer_local_spec(normalization="RMSNorm")
    if attention != "stock":
        spec = _block_spec(spec, config, attention)
    if attention == "packed":
        fuse_rotation(config)
    drop_log_lines()
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=vocabulary,
        max_sequence_length=0,  # only learned positions and exports read it
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=int(shape.rope_base),
        share_embeddings_and_output_weights=shape.tie_embeddings,
        parallel_output=True,
    )
    use_position_rotary(model)
    if attention != "stock":
        # All stages run forward phases together, then backward phases: in each the last one must not be late. With as
        # many layers as the others it is, so that what counts is the fewest products in all.
        fuse_loss(model, attention == "disaggregated" and config.num_layers_in_last_pipeline_stage is not None)
        fuse_swiglu(model)
    if attention == "disaggregated":
        assert pool is not None
        disaggregate(model.decoder, pool, recompute_segments)
    elif attention == "packed":
        assert kernel is not None and timeline is not None
        for module in model.modules():
            if isinstance(module, PackedAttention):
                module.kernel, module.timeline = kernel, timeline
    return model


def _block_spec(layer: ModuleSpec, config: TransformerConfig, attention: Attention) -> TransformerBlockSubmodules:
    """megatron's local spec with norms that know sequence parallelism and core attention that knows documents."""
    if attention == "disaggregated":
        layer.module = SplitTransformerLayer
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return TransformerBlockSubmodules([layer] * get_num_layers_to_build(config), RMSNorm)
