"""Megatron-Core's HybridModel: gated delta nets by fla's kernels, over context-parallel ranks by exchanges of heads.

On CPUs Megatron's own code in torch computes these layers, one document at a time.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

from distca.models.shape import ModelShape
from distca.train.config.schema import RunConfig


def hybrid_fields(run: RunConfig, on_gpu: bool) -> dict[str, Any]:
    """The fields of gated delta nets; empty without recurrent layers."""
    hybrid = run.model.hybrid
    if not hybrid.pattern:
        return {}
    return {
        "attention_output_gate": hybrid.output_gate,
        "linear_num_key_heads": hybrid.key_heads,
        "linear_num_value_heads": hybrid.value_heads,
        "linear_key_head_dim": hybrid.key_dim,
        "linear_value_head_dim": hybrid.value_dim,
        "layernorm_zero_centered_gamma": run.model.variant.zero_centered_norms,
        "deterministic_mode": not on_gpu,
    }


def build_hybrid(run: RunConfig, config: TransformerConfig, on_gpu: bool) -> Any:
    """Megatron's model of a hybrid stack."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    shape, tp = run.model, run.parallel.tp
    if on_gpu:
        _use_right_gradients(shape, config)
    return HybridModel(
        config=config,
        hybrid_stack_spec=_te_stack(shape) if on_gpu else _local_stack(shape),
        vocab_size=-(-shape.vocabulary // tp) * tp,
        max_sequence_length=run.data.context_length,
        hybrid_layer_pattern=shape.hybrid.symbols(shape.layers),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope" if shape.hybrid.rotate else "none",
        rotary_percent=shape.variant.rotary_percent,
        rotary_base=shape.rope_base,  # type: ignore[arg-type]  # any number works
        share_embeddings_and_output_weights=shape.tie_embeddings,
        parallel_output=True,
    )


def _te_stack(shape: ModelShape) -> ModuleSpec:
    """Megatron's stack, with the norms of queries and keys that its GPTModel has."""
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    if not shape.qk_norm:
        return hybrid_stack_spec
    layers = hybrid_stack_spec.submodules
    parts = layers.attention_layer.submodules
    heads = replace(parts.self_attention.submodules, q_layernorm=TENorm, k_layernorm=TENorm)
    parts = replace(parts, self_attention=replace(parts.self_attention, submodules=heads))
    layers = replace(layers, attention_layer=replace(layers.attention_layer, submodules=parts))
    return replace(hybrid_stack_spec, submodules=layers)


def _local_stack(shape: ModelShape) -> ModuleSpec:
    """The same of Megatron's local layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from benchmarks.peers.on_cpus import Norm

    attention = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    parts = attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    if shape.qk_norm:
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = Norm
    mlp = deepcopy(attention)
    mlp.module = MLPLayer
    mlp.submodules.input_layernorm = mlp.submodules.self_attention = IdentityOp
    mlp.submodules.self_attn_bda = IdentityFuncOp
    parts.pre_mlp_layernorm = parts.mlp = IdentityOp
    parts.mlp_bda = IdentityFuncOp
    recurrent = deepcopy(attention)
    recurrent.submodules.self_attention = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear),
    )
    layers = HybridStackSubmodules(gdn_layer=recurrent, attention_layer=attention, mlp_layer=mlp)
    return ModuleSpec(module=HybridStack, submodules=layers)


def _use_right_gradients(shape: ModelShape, config: TransformerConfig) -> None:
    """Let fla compute gradients as this project's modes do, where it refuses its own kernel; every rank calls it
    together."""
    from distca.recurrent import choose_recurrent_kernel
    from distca.recurrent.fla_delta_rule import let_fla_differentiate

    what = shape.hybrid.recurrence(shape.recurrent_layers[0], config.tensor_model_parallel_size)
    device = torch.device("cuda", torch.cuda.current_device())
    let_fla_differentiate(choose_recurrent_kernel(what, device, config.params_dtype))
