"""Megatron-Core's GPTModel or HybridModel of a model's shape, and its configuration."""

from __future__ import annotations

from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from distca.errors import SupportError
from distca.models.shape import ModelShape
from distca.sizes.fp8_shapes import Fp8
from megatron_patches.model.expert_fields import expert_fields
from megatron_patches.model.hybrid_fields import hybrid_fields
from megatron_patches.model.latent import latent_fields
from megatron_patches.model.model_variant import variant_fields
from megatron_patches.patches.gpt_forward import leave_out_padding
from megatron_patches.patches.position_rotary import PositionRotary
from megatron_patches.te.quantization import config_fields


def transformer_config(
    shape: ModelShape,
    dtype: torch.dtype,
    *,
    sequence_parallel: bool = False,
    recompute_mlp: bool = False,
    cpu_initialization: bool = False,
    fp8: Fp8 = "none",
    fp8_weights: bool = False,
    init_std: float = 0.02,
) -> TransformerConfig:
    """Returns megatron's configuration of the model.

    Args:
        shape: the model's sizes, and its differences from LLaMA's. CAD takes the options that the configuration has no
            fields for, from :func:`~megatron_patches.model.model_variant.model_options`.
        dtype: dtype of parameters and activations.
        sequence_parallel: whether activations between tensor-parallel blocks are sharded by tokens.
        recompute_mlp: whether backward recomputes every layer's MLP or experts, in unmodified and in disaggregated
            blocks.
        cpu_initialization: whether weights are drawn on the CPU, the same for every tensor-parallel size.
        fp8: how Transformer Engine's linear layers scale their products' tensors to FP8.
        fp8_weights: whether their weights are held as FP8 numbers alone.
        init_std: standard deviation of the weights at the start.
    """
    tp, latent = parallel_state.get_tensor_model_parallel_world_size(), latent_fields(shape)
    made = MLATransformerConfig if latent else TransformerConfig
    fields = {**variant_fields(shape), **expert_fields(shape), **hybrid_fields(shape), **latent}
    return made(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.resolved_head_dim,
        layernorm_epsilon=shape.norm_epsilon,
        init_method_std=init_std,
        add_qkv_bias=shape.qkv_bias,
        **_windows(shape),
        softmax_type="learnable" if shape.sinks else "vanilla",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # The loss is summed over tokens, and divided once by the tokens of the whole global batch.
        calculate_per_token_loss=True,
        # megatron's own attention needs it for masked documents. Ours does not read it.
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        tensor_model_parallel_size=tp,
        batch_p2p_sync=False,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        sequence_parallel=sequence_parallel and tp > 1,
        use_cpu_initialization=cpu_initialization,
        recompute_granularity="selective" if recompute_mlp else None,
        # Without Transformer Engine megatron-core 0.16.1 fails to recompute norms.
        recompute_modules=(["mlp", "moe"] if shape.experts.count else ["mlp"]) if recompute_mlp else None,
        **{"add_bias_linear": False, "qk_layernorm": shape.qk_norm, **fields},
        **config_fields(fp8, fp8_weights),
    )


def build_gpt(
    shape: ModelShape,
    vocabulary: int,
    config: TransformerConfig,
    spec: ModuleSpec | TransformerBlockSubmodules,
    rotary_percent: float = 1.0,
) -> GPTModel:
    """Builds this stage's part of Megatron's GPTModel, on the current device.

    Args:
        shape: the model's sizes.
        vocabulary: number of token ids. The embedding and the output layer get further rows, up to a multiple of the
            tensor-parallel size; the loss leaves these out.
        config: from :func:`transformer_config`.
        spec: the spec of its layers, such as CAD.block_spec gives.
        rotary_percent: the part of each head that is rotated, 1 for all of it.

    Raises:
        SupportError: a part of each head is rotated, and the scaling has an attention factor. ``softmax_scale`` can
            hold that factor for whole heads only.
    """
    if rotary_percent < 1.0 and shape.rope_scaling.resolved_attention_factor != 1.0:
        raise SupportError(
            f"rotary_percent is {rotary_percent} and rope_scaling has an attention factor, which is on scores of whole "
            "heads: give CAD ModelOptions with `rotations` for all layers in place of both."
        )
    tp, alike = parallel_state.get_tensor_model_parallel_world_size(), shape.variant.turns_alike
    rows = -(-vocabulary // tp) * tp
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=rows,
        max_sequence_length=0,  # only learned positions and exports read it
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_percent=rotary_percent,
        # Any number works where layers rotate by different bases, which are in ModelOptions.
        rotary_base=shape.rope_base if alike else 10000,  # type: ignore[arg-type]
        share_embeddings_and_output_weights=shape.tie_embeddings,
        parallel_output=True,
    )
    if alike and shape.rope_scaling.kind != "none" and not shape.latent.kv_rank:
        dims = int(shape.resolved_head_dim * rotary_percent)
        model.rotary_pos_emb = PositionRotary.of(
            dims, shape.rope_base, shape.rope_scaling, interleaved=config.rotary_interleaved
        )
    if rows > vocabulary:
        leave_out_padding(model, vocabulary)
    return model


def build_model(shape: ModelShape, vocabulary: int, cad: Any) -> Any:
    """Builds Megatron's GPTModel, or the HybridModel of a hybrid stack, with CAD's spec.

    Args:
        shape: the model's sizes.
        vocabulary: number of token ids, padded as in :func:`build_gpt`.
        cad: :class:`megatron_patches.api.CAD`, made with
            :func:`~megatron_patches.model.model_variant.cad_keywords` of the shape.
    """
    if shape.hybrid.pattern:
        return build_hybrid_of(shape, vocabulary, cad.config, cad.hybrid_stack_spec())
    return build_gpt(shape, vocabulary, cad.config, cad.block_spec())


def build_hybrid_of(shape: ModelShape, vocabulary: int, config: TransformerConfig, spec: ModuleSpec) -> Any:
    """Builds Megatron's HybridModel of a shape; arguments as in :func:`build_hybrid`. Where layers rotate by different
    bases, these are in ModelOptions."""
    model = build_hybrid(
        vocabulary,
        config,
        spec,
        shape.hybrid.of_stages(shape.layers, parallel_state.get_pipeline_model_parallel_world_size()),
        rotary_base=shape.rope_base,
        positions="rope" if shape.hybrid.rotate else "none",
        tied=shape.tie_embeddings,
    )
    if shape.hybrid.rotate and shape.variant.turns_alike and shape.rope_scaling.kind != "none":
        model.rotary_pos_emb = PositionRotary.of(shape.resolved_head_dim, shape.rope_base, shape.rope_scaling)
    return model


def build_hybrid(
    vocabulary: int,
    config: TransformerConfig,
    spec: ModuleSpec,
    pattern: str,
    *,
    rotary_base: float = 10000.0,
    rotary_percent: float = 1.0,
    positions: Literal["rope", "none"] = "rope",
    tied: bool = False,
) -> Any:
    """Builds Megatron's HybridModel on the current device.

    Args:
        vocabulary: number of token ids, padded as in :func:`build_gpt`.
        config: from :func:`transformer_config`.
        spec: the spec of its stack, such as CAD.hybrid_stack_spec gives.
        pattern: the pattern of its layers.
        rotary_base: base of the frequencies.
        rotary_percent: the part of each head that is rotated, 1 for all of it.
        positions: whether queries and keys are rotated at all.
        tied: whether the output layer's weights are the embedding's.
    """
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    tp = parallel_state.get_tensor_model_parallel_world_size()
    rows = -(-vocabulary // tp) * tp
    model = HybridModel(
        config=config,
        hybrid_stack_spec=spec,
        vocab_size=rows,
        max_sequence_length=0,
        hybrid_layer_pattern=pattern,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type=positions,
        rotary_percent=rotary_percent,
        rotary_base=rotary_base,  # type: ignore[arg-type]
        share_embeddings_and_output_weights=tied,
        parallel_output=True,
    )
    if rows > vocabulary:
        leave_out_padding(model, vocabulary)
    return model


def _windows(shape: ModelShape) -> dict[str, Any]:
    """Returns Megatron's fields for layers with windows, which are all of one size. Megatron does not count a query's
    own key."""
    sizes = {window for window in shape.windows if window}
    if not sizes:
        return {}
    (size,) = sizes
    return {"window_size": (size - 1, 0), "window_attn_skip_freq": [int(window > 0) for window in shape.windows]}
