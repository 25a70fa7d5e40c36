"""The tensors of a model's folder, by name and shape; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from distca.models.description import ModelDescription
from distca.models.stored import BODY, layer_prefix

EMBEDDING, OUTPUT, FINAL_NORM = f"{BODY}.embed_tokens.weight", "lm_head.weight", f"{BODY}.norm.weight"


def expected_shapes(model: ModelDescription) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a model of this description has, by its name in transformers."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (model.vocabulary, model.hidden), FINAL_NORM: (model.hidden,)}
    if not model.tie_embeddings:
        shapes[OUTPUT] = (model.vocabulary, model.hidden)
    around, dense, mixture = _around_mlp(model), _mlp(model), _experts(model)
    for number, kind in enumerate(model.layer_kinds):
        layer = around | (mixture if kind.mlp.experts.count else dense)
        shapes |= {layer_prefix(number) + name: shape for name, shape in layer.items()}
    return shapes


def _around_mlp(model: ModelDescription) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's tensors, but for those of its MLP or its experts."""
    q, kv, names = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.weights
    shapes: dict[str, tuple[int, ...]] = {
        f"{names.attention_output}.weight": (model.hidden, q),
    }
    variant = model.variant
    shapes |= {f"{name}.weight": (model.hidden,) for name in names.norms(variant.norms, variant.parallel_mlp)}
    if variant.attention_output_bias:
        shapes[f"{names.attention_output}.bias"] = (model.hidden,)
    for name, rows in stored_rows(names.query_key_value, (q, kv, kv)).items():
        shapes[f"{name}.weight"] = (rows, model.hidden)
        if model.qkv_bias:
            shapes[f"{name}.bias"] = (rows,)
    if model.sinks:
        shapes[names.sinks] = (model.heads,)
    if model.qk_norm:
        wide = variant.query_key_norm == "width"
        shapes[f"{names.query_norm}.weight"] = (q if wide else model.head_dim,)
        shapes[f"{names.key_norm}.weight"] = (kv if wide else model.head_dim,)
    return shapes


def _mlp(model: ModelDescription) -> dict[str, tuple[int, ...]]:
    names, variant = model.weights, model.variant
    shapes: dict[str, tuple[int, ...]] = {f"{names.down}.weight": (model.hidden, model.ffn)}
    for name, rows in stored_rows(names.gate_up, (model.ffn,) * (1 + variant.gated)).items():
        shapes[f"{name}.weight"] = (rows, model.hidden)
        if variant.mlp_bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes | ({f"{names.down}.bias": (model.hidden,)} if variant.mlp_bias else {})


def _experts(model: ModelDescription) -> dict[str, tuple[int, ...]]:
    experts, names = model.experts, model.weights.experts
    shapes: dict[str, tuple[int, ...]] = {f"{names.router}.weight": (experts.count, model.hidden)}
    if experts.biases:
        shapes[f"{names.router}.bias"] = (experts.count,)
    if experts.bias:
        shapes[names.choice_bias] = (experts.count,)
    if experts.shared_ffn:
        shapes |= {f"{part}.weight": (experts.shared_ffn, model.hidden) for part in names.shared_gate_up}
        shapes[f"{names.shared_down}.weight"] = (model.hidden, experts.shared_ffn)
    if names.stacked:
        (gate_up,), inner = names.gate_up, 2 * experts.ffn
        for part, rows, columns in ((gate_up, inner, model.hidden), (names.down, model.hidden, experts.ffn)):
            widths = (columns, rows) if names.input_first else (rows, columns)
            shapes[f"{names.experts}.{part}"] = (experts.count, *widths)
            if experts.biases:
                shapes[f"{names.experts}.{part}_bias"] = (experts.count, rows)
        return shapes
    for number in range(experts.count):
        for part in names.gate_up:
            shapes[names.of(number, part)] = (experts.ffn, model.hidden)
        shapes[names.of(number, names.down)] = (model.hidden, experts.ffn)
    return shapes


def stored_rows(names: Sequence[str], rows: Sequence[int]) -> dict[str, int]:
    """Rows of each tensor that holds parts of so many rows: one each, or a single one that holds all of them."""
    return {names[0]: sum(rows)} if len(names) == 1 else dict(zip(names, rows, strict=True))
