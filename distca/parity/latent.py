"""Multi-head latent attention: Megatron-Core's layer on a CPU, and cases that compare with it.

Megatron-Core's local spec names a DotProductAttention that does not take the widths of keys and values, which its
latent attention gives it; what it computes takes any.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention

from distca.parity.cases import LENGTHS, ParityCase, ParityShape


class NarrowValues(DotProductAttention):
    """Megatron's, whose output is as wide as the values. Megatron makes one without their widths first, which it drops
    again."""

    def __init__(
        self, config: TransformerConfig, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.hidden_size_per_partition = config.num_attention_heads * v_channels


def latent_layer(config: TransformerConfig) -> ModuleSpec:
    """Megatron's local spec of a layer with latent attention."""
    layer = get_gpt_layer_local_spec(
        normalization=config.normalization, qk_layernorm=config.qk_layernorm, multi_latent_attention=True
    )
    layer.submodules.self_attention.submodules.core_attention = NarrowValues
    return layer


def latent_cases() -> list[ParityCase]:
    """Low-rank queries and whole ones, norms of latent rows and none, RoPE and YaRN, in all modes."""
    sizes = {"kv_lora_rank": 20, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6}
    low, whole = ({"multi_latent_attention": True, **sizes, "q_lora_rank": rank} for rank in (12, None))
    rope = {"rope_type": "rope", "rotary_base": 100.0}
    yarn = {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16}
    yarn |= {"mscale": 0.7, "mscale_all_dim": 1.0}
    alike = {"qk_head_dim": 6, "qk_pos_emb_head_dim": 2, "v_head_dim": 8}
    cases: list[dict[str, Any]] = [
        {"config": {**low, **rope, "qk_layernorm": True}},
        {"config": {**whole, **yarn}, "backward": "resend", "recompute": "all"},
        {
            "config": {**low, **yarn, "qk_layernorm": True},
            "backward": "resend",
            "recompute": "mlp",
            "ping_pong": False,
        },
        {"config": {**whole, **rope, **alike}, "recompute": "all", "scheduler": "random"},
        {"config": {**low, **yarn}, "backward": "resend", "recompute": "all", "offload": True},
    ]
    return [ParityCase(micro_batches=LENGTHS, shape=ParityShape(kv_heads=4), **case) for case in cases]
