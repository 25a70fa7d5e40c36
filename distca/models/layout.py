"""Which tensors a model's folder has, by name and shape; needs no torch."""

from __future__ import annotations

from distca.models.description import ModelDescription

_BODY = "model"
EMBEDDING, OUTPUT, FINAL_NORM = f"{_BODY}.embed_tokens.weight", "lm_head.weight", f"{_BODY}.norm.weight"


def layer_prefix(number: int) -> str:
    """What the names of a layer's tensors begin with, dot included."""
    return f"{_BODY}.layers.{number}."


def expected_shapes(model: ModelDescription) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a model of this description has, by its name in transformers."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (model.vocabulary, model.hidden), FINAL_NORM: (model.hidden,)}
    if not model.tie_embeddings:
        shapes[OUTPUT] = (model.vocabulary, model.hidden)
    layer = _layer_shapes(model)
    return shapes | {
        layer_prefix(number) + name: shape for number in range(model.layers) for name, shape in layer.items()
    }


def _layer_shapes(model: ModelDescription) -> dict[str, tuple[int, ...]]:
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (model.hidden,),
        "self_attn.q_proj.weight": (q, model.hidden),
        "self_attn.k_proj.weight": (kv, model.hidden),
        "self_attn.v_proj.weight": (kv, model.hidden),
        "self_attn.o_proj.weight": (model.hidden, q),
        "post_attention_layernorm.weight": (model.hidden,),
        "mlp.gate_proj.weight": (model.ffn, model.hidden),
        "mlp.up_proj.weight": (model.ffn, model.hidden),
        "mlp.down_proj.weight": (model.hidden, model.ffn),
    }
    if model.qkv_bias:
        shapes |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if model.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (model.head_dim,) for name in "qk"}
    return shapes
