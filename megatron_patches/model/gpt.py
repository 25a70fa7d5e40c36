"""Makes Megatron's TransformerConfig, GPTModel and HybridModel from a :class:`distca.models.shape.ModelShape`."""

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
    """Returns Megatron's configuration of a model.

    Args:
        shape: sizes and settings of the model. ``model_options`` (``model_variant.py``) returns the settings that
            have no field in the configuration.
        sequence_parallel: Megatron's ``sequence_parallel``; ignored without tensor parallelism.
        recompute_mlp: whether backward recomputes every layer's MLP or experts.
        cpu_initialization: whether weights are drawn on the CPU, where they do not depend on the tensor-parallel size.
        fp8: how Transformer Engine's linear layers scale tensors to FP8, or "none".
        fp8_weights: whether Transformer Engine's linear layers store weights in FP8, without a copy in ``dtype``.
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
        calculate_per_token_loss=True,  # losses are summed over tokens, and divided once by the global batch's tokens
        # Only Megatron's own core attention reads the next two.
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
        # Not norms: without Transformer Engine, Megatron-Core 0.16.1 cannot recompute them.
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
    """Builds this pipeline stage's part of Megatron's GPTModel, on the current device.

    Args:
        vocabulary: number of token ids. Embedding and output layer are padded to a multiple of the tensor-parallel
            size, and the loss leaves the padding out.
        spec: the spec of the layers, for example from ``block_spec`` of ``distca.CAD``.
        rotary_percent: share of each head's dimensions that RoPE rotates, from 0 to 1.

    Raises:
        SupportError: ``rotary_percent`` is below 1, and the shape's RoPE scaling has a factor on cosines and sines.
    """
    if rotary_percent < 1.0 and shape.rope_scaling.resolved_attention_factor != 1.0:
        raise SupportError(
            f"rotary_percent is {rotary_percent} and rope_scaling has an attention factor. The factor is only for "
            "rotated dimensions, but would multiply whole scores: give CAD ModelOptions with `rotations` for all "
            "layers in place of both settings."
        )
    tp, alike = parallel_state.get_tensor_model_parallel_world_size(), shape.variant.turns_alike
    rows = -(-vocabulary // tp) * tp
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=rows,
        max_sequence_length=0,  # read for learned positions and exports only
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_percent=rotary_percent,
        # Unless ``alike``, each layer takes its base from ModelOptions, and 10000 is not read.
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
    """Builds Megatron's GPTModel, or a HybridModel if the shape has a pattern of layers.

    ``cad`` is a ``distca.CAD`` that was made with the keywords of ``cad_keywords(shape)`` (``model_variant.py``).
    """
    if shape.hybrid.pattern:
        return build_hybrid_of(shape, vocabulary, cad.config, cad.hybrid_stack_spec())
    return build_gpt(shape, vocabulary, cad.config, cad.block_spec())


def build_hybrid_of(shape: ModelShape, vocabulary: int, config: TransformerConfig, spec: ModuleSpec) -> Any:
    """Builds this pipeline stage's part of Megatron's HybridModel from a shape with a pattern of layers.

    ``spec`` is the spec of the stack of layers, for example from ``hybrid_stack_spec`` of ``distca.CAD``.
    """
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
    """Builds this pipeline stage's part of Megatron's HybridModel, on the current device.

    Args:
        spec: the spec of the stack of layers, for example from ``hybrid_stack_spec`` of ``distca.CAD``.
        pattern: Megatron's ``hybrid_layer_pattern``: one symbol for each layer, and ``|`` between pipeline stages.
        rotary_percent: share of each head's dimensions that RoPE rotates, from 0 to 1.
        tied: whether the embedding and the output layer share their weights.
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
    """Returns Megatron's fields for layers with windows, which must all have one size.

    Megatron's ``window_size`` does not count the query's own key, and ``shape.windows`` does.
    """
    sizes = {window for window in shape.windows if window}
    if not sizes:
        return {}
    (size,) = sizes
    return {"window_size": (size - 1, 0), "window_attn_skip_freq": [int(window > 0) for window in shape.windows]}
