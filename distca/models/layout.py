"""The tensors of a model's folder, by name and shape; needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Final

from distca.models.description import ModelDescription
from distca.models.hybrid import ATTENTION, CONVOLUTION, DELTA_NET, EXPERTS, MAMBA, MLP
from distca.models.stored import layer_prefix

OUTPUT = "lm_head.weight"


def expected_shapes(model: ModelDescription) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a model of this description has, by its name in transformers."""
    names = model.weights
    shapes: dict[str, tuple[int, ...]] = {
        names.embedding: (model.vocabulary, model.hidden),
        names.final_norm: (model.hidden,),
    }
    if not model.tie_embeddings:
        shapes[OUTPUT] = (model.vocabulary, model.hidden)
    of_symbol = {symbol: _OF_SYMBOL[symbol](model) for symbol in {symbol for _, symbol in model.stored_parts}}
    for number, symbol in model.stored_parts:
        shapes |= {layer_prefix(number) + name: shape for name, shape in of_symbol[symbol].items()}
    return shapes


def _attention(model: ModelDescription) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's tensors in and around attention. With an output gate each query head has one behind it."""
    q, kv, names = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.weights
    variant = model.variant
    shapes: dict[str, tuple[int, ...]] = {
        f"{names.attention_output}.weight": (model.hidden, model.heads * model.value_dim)
    }
    shapes |= {f"{name}.weight": (model.hidden,) for name in names.mixer_norms(variant.norms)}
    if variant.attention_output_bias:
        shapes[f"{names.attention_output}.bias"] = (model.hidden,)
    if model.latent.kv_rank:
        return shapes | _latent(model)
    for name, rows in stored_rows(names.query_key_value, (q * (1 + model.hybrid.output_gate), kv, kv)).items():
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


def _recurrent(model: ModelDescription, mixer: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a recurrent layer, and of the norm before it."""
    hybrid, names = model.hybrid, model.weights
    name, heads, parts = names.recurrent.name, (hybrid.value_heads,), iter(hybrid.projected(mixer))
    shapes: dict[str, tuple[int, ...]] = {f"{norm}.weight": (model.hidden,) for norm in names.mixer_norms("pre")}
    for projection, count in names.recurrent.projections:
        shapes[name(f"{projection}.weight")] = (sum(islice(parts, count)), model.hidden)
    shapes |= {
        name("conv1d.weight"): (hybrid.channels, 1, CONVOLUTION),
        name("dt_bias"): heads,
        name("A_log"): heads,
        name("norm.weight"): (hybrid.value_dim if mixer == DELTA_NET else hybrid.values,),
        name("out_proj.weight"): (model.hidden, hybrid.values),
    }
    return shapes | ({name("conv1d.bias"): (hybrid.channels,), name("D"): heads} if mixer == MAMBA else {})


def _mlp_norms(model: ModelDescription) -> dict[str, tuple[int, ...]]:
    variant = model.variant
    names = model.weights.mlp_norms(variant.norms, variant.parallel_mlp)
    return {f"{name}.weight": (model.hidden,) for name in names}


def _latent(model: ModelDescription) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that stand for projections of q, k and v."""
    latent, names, q = model.latent, model.weights.latent, model.heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        f"{names.down}.weight": (latent.kv_rank + latent.rotary_dim, model.hidden),
        f"{names.norm}.weight": (latent.kv_rank,),
        f"{names.up}.weight": (model.heads * (latent.key_dim + latent.value_dim), latent.kv_rank),
    }
    if not latent.q_rank:
        return shapes | {f"{names.query}.weight": (q, model.hidden)}
    return shapes | {
        f"{names.query_down}.weight": (latent.q_rank, model.hidden),
        f"{names.query_norm}.weight": (latent.q_rank,),
        f"{names.query_up}.weight": (q, latent.q_rank),
    }


def _mlp(model: ModelDescription) -> dict[str, tuple[int, ...]]:
    names, variant = model.weights, model.variant
    shapes = _mlp_norms(model) | {f"{names.down}.weight": (model.hidden, model.ffn)}
    for name, rows in stored_rows(names.gate_up, (model.ffn,) * (1 + variant.gated)).items():
        shapes[f"{name}.weight"] = (rows, model.hidden)
        if variant.mlp_bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes | ({f"{names.down}.bias": (model.hidden,)} if variant.mlp_bias else {})


def _experts(model: ModelDescription) -> dict[str, tuple[int, ...]]:
    experts, names = model.experts, model.weights.experts
    shapes = _mlp_norms(model) | {f"{names.router}.weight": (experts.count, model.hidden)}
    if experts.biases:
        shapes[f"{names.router}.bias"] = (experts.count,)
    if experts.bias:
        shapes[names.choice_bias] = (experts.count,)
    if experts.shared_ffn:
        shapes |= {f"{part}.weight": (experts.shared_ffn, model.hidden) for part in names.shared_gate_up}
        shapes[f"{names.shared_down}.weight"] = (model.hidden, experts.shared_ffn)
    if experts.shared_gate:
        shapes[f"{names.shared_gate}.weight"] = (1, model.hidden)
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


_OF_SYMBOL: Final[dict[str, Callable[[ModelDescription], dict[str, tuple[int, ...]]]]] = {
    ATTENTION: _attention,
    DELTA_NET: partial(_recurrent, mixer=DELTA_NET),
    MAMBA: partial(_recurrent, mixer=MAMBA),
    MLP: _mlp,
    EXPERTS: _experts,
}
"""Functions that give the shapes of a layer's part, by its symbol in a hybrid stack's pattern."""
