"""The names under which a family's folders hold the parts of a layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WeightMap:
    """Names of a layer's tensors, without the layer's prefix and without .weight or .bias.

    Attributes:
        attention_norm: norm before attention.
        query_key_value: projections of q, k and v; a single name holds all rows of q, then those of k and of v.
        query_norm: norm of query heads, where the family has one.
        key_norm: norm of key heads, where the family has one.
        attention_output: projection behind attention.
        mlp_norm: norm before the MLP.
        gate_up: the MLP's gate and up projections; a single name holds all rows of the gate, then those of up.
        down: the MLP's last projection.
    """

    attention_norm: str = "input_layernorm"
    query_key_value: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    attention_output: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
