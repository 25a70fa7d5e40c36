"""The matrix products of a model, with the layers that have each."""

from __future__ import annotations

from dataclasses import dataclass

from distca.train.config.schema import RunConfig


@dataclass(frozen=True)
class Product:
    """A weight of one tensor-parallel rank.

    Attributes:
        name: which.
        width: its columns, the layer's input.
        out: its rows.
        layers: that have it.
    """

    name: str
    width: int
    out: int
    layers: int


def products_of(config: RunConfig) -> list[Product]:
    """The products of layers with attention, of recurrent layers and of MLPs, and last the output layer's.

    Experts that a token goes to count as one product as wide as all of them, which none of their own can beat.
    """
    model, tp = config.model, config.parallel.tp
    hidden, hybrid, kinds = model.hidden, model.hybrid, model.layer_kinds
    shape = config.attention_shape
    heads, attention, recurrent = shape.heads * model.value_dim, len(model.attention_kinds), model.recurrent_layers
    mlps = [kind.mlp for kind in kinds if kind.mlp.weights(hidden)]
    found = [Product("proj", heads, hidden, attention)]
    if (latent := model.latent).kv_rank:
        queries = shape.heads * latent.head_dim
        if latent.q_rank:
            found.append(Product("q_down", hidden, latent.q_rank, attention))
        found += [
            Product("q", latent.q_rank or hidden, queries, attention),
            Product("kv_down", hidden, latent.kv_rank + latent.rotary_dim, attention),
            Product("kv_up", latent.kv_rank, shape.heads * (latent.key_dim + latent.value_dim), attention),
        ]
    else:
        columns = heads * (1 + hybrid.output_gate) + 2 * shape.kv_heads * shape.head_dim
        found.insert(0, Product("qkv", hidden, columns, attention))
    if recurrent:
        found += [
            Product("in_proj", hidden, sum(hybrid.projected(recurrent[0])) // tp, len(recurrent)),
            Product("out_proj", hybrid.values // tp, hidden, len(recurrent)),
        ]
    if mlps:
        ups = 1 + mlps[0].gated
        ffn = sum(mlp.weights(hidden) for mlp in mlps) // (len(mlps) * (ups + 1) * hidden)
        found += [
            Product("fc1", hidden, ups * ffn // tp, len(mlps)),
            Product("fc2", ffn // tp, hidden, len(mlps)),
        ]
    return [*found, Product("output", hidden, model.vocabulary // tp, 1)]
