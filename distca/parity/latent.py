"""Megatron-Core's layer with multi-head latent attention on a CPU.

Megatron-Core's local spec names a DotProductAttention that does not take the widths of keys and values, which its
latent attention gives it; what it computes takes any. If queries have no latent rows, it builds no projection of
queries without Transformer Engine. With it, also the projection's input gets a norm; here it has none.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm


class NarrowValues(DotProductAttention):
    """Megatron's, whose output is as wide as the values. Megatron makes one without their widths first, which it drops
    again."""

    def __init__(
        self, config: TransformerConfig, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.hidden_size_per_partition = config.num_attention_heads * v_channels


class NormedLatentRows(MLASelfAttention):
    """Megatron's, in which queries have no latent rows, with the norm of keys' and values' latent rows that it has in
    Transformer Engine's layers."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        linears = dict.fromkeys(("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj"), ColumnParallelLinear)
        return {**linears, "kv_layernorm": WrappedTorchNorm}


def latent_layer(config: TransformerConfig, **experts: Any) -> ModuleSpec:
    """Megatron's local spec of a layer with latent attention; ``experts``: what it asks of one with experts."""
    layer = get_gpt_layer_local_spec(
        normalization=config.normalization, qk_layernorm=config.qk_layernorm, multi_latent_attention=True, **experts
    )
    attention = layer.submodules.self_attention
    attention.submodules.core_attention = NarrowValues
    if config.qk_layernorm and config.q_lora_rank is None:  # type: ignore[attr-defined]
        attention.module = NormedLatentRows
    return layer
