"""The tensors of a model's folder, by name and shape; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from distca.models.description import ModelDescription

_BODY = "model"
EMBEDDING, OUTPUT, FINAL_NORM = f"{_BODY}.embed_tokens.weight", "lm_head.weight", f"{_BODY}.norm.weight"


def layer_prefix(number: int) -> str:
    """Returns the beginning of the names of a layer's tensors, dot included."""
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
    q, kv, names = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.weights
    shapes: dict[str, tuple[int, ...]] = {
        f"{names.attention_output}.weight": (model.hidden, q),
        f"{names.down}.weight": (model.hidden, model.ffn),
    }
    variant = model.variant
    shapes |= {f"{name}.weight": (model.hidden,) for name in names.norms(variant.norms, variant.parallel_mlp)}
    if variant.mlp_bias:
        shapes[f"{names.down}.bias"] = (model.hidden,)
    if variant.attention_output_bias:
        shapes[f"{names.attention_output}.bias"] = (model.hidden,)
    for name, rows in stored_rows(names.query_key_value, (q, kv, kv)).items():
        shapes[f"{name}.weight"] = (rows, model.hidden)
        if model.qkv_bias:
            shapes[f"{name}.bias"] = (rows,)
    for name, rows in stored_rows(names.gate_up, (model.ffn,) * (1 + variant.gated)).items():
        shapes[f"{name}.weight"] = (rows, model.hidden)
        if variant.mlp_bias:
            shapes[f"{name}.bias"] = (rows,)
    if model.sinks:
        shapes[names.sinks] = (model.heads,)
    if model.qk_norm:
        wide = variant.query_key_norm == "width"
        shapes[f"{names.query_norm}.weight"] = (q if wide else model.head_dim,)
        shapes[f"{names.key_norm}.weight"] = (kv if wide else model.head_dim,)
    return shapes


def stored_rows(names: Sequence[str], rows: Sequence[int]) -> dict[str, int]:
    """Rows of each tensor that holds parts of so many rows: one each, or a single one that holds all of them."""
    return {names[0]: sum(rows)} if len(names) == 1 else dict(zip(names, rows, strict=True))
