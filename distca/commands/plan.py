"""``distca plan``: what disaggregation would do to a batch, from document lengths alone. No GPU, no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from inspect import signature
from typing import Any

from distca.commands.lengths import MOST_TOKENS, read_data, read_lengths
from distca.commands.options import check_least, check_most, check_picture, check_tolerance, writing
from distca.commands.plan_recurrent import RecurrentFigures, gated_delta_net
from distca.commands.plan_results import draw, figures, summary
from distca.commands.plan_step_results import replanned
from distca.data.encoding import Bad
from distca.data.lengths import DATA_KINDS
from distca.data.sampler import Sampler
from distca.data.sources import passed_over
from distca.errors import OptionError
from distca.plan import AttentionKind, CostModel, Links, analytic_cost, load_table, plan_micro_batch, training_tolerance
from distca.plan.cost.analytic import cost_of_kind
from distca.plan.kinds import numbered, windows_of
from distca.plan.step_file import read_step
from distca.words import rename_parameters

_MOST = 1 << 20
"""No number of ranks, heads or the like comes near; numpy's integers hold what follows from it."""


def plan(
    lengths: str,
    ranks: int = 8,
    *,
    tokens_per_rank: int = 131_072,
    servers: int = 0,
    seed: int = 0,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    layers: int | None = None,
    layer_types: str = "full",
    window: int = 0,
    recurrent_heads: str = "16,32,128,128",
    nano_batches: int = 1,
    resend: bool = False,
    tolerance: float | None = None,
    ranks_per_node: int = 0,
    cost_table: str | None = None,
    picture: str | None = None,
    tokenizer: str = "bytes",
    field: str | None = None,
    conversations: bool = False,
    bad: Bad = "error",
    json: bool = False,
) -> None:
    """Plan one micro-batch and show the balance before and after, the bytes that travel and the memory they take.

    Args:
        lengths: a file with one document length per line; a mix: pretrain, prolong, pretrain-long or prolong-long; or
            training data as text:PATH, jsonl:PATH, parquet:PATH, arrow:PATH, blend:PATH or indexed:PATH, whose first
            micro-batch is planned; or the file of a step that a run could not plan, which has all options itself.
        ranks: home ranks, which are also attention servers.
        servers: servers without a model beside them.
        tokens_per_rank: tokens of a mix or of training data for every rank; a file of lengths is taken as it is.
        seed: of the draw from a mix, and of the order of training data.
        heads: query heads per rank (32); a cost table has its own.
        kv_heads: key/value heads per rank (8); a cost table has its own.
        head_dim: size of a head (128); a cost table has its own.
        layers: layers to count bytes for; by default as many as layer_types.
        layer_types: full, window or recurrent for each layer, comma-separated, from the first on again where there are
            more layers. Each kind of attention has a plan of its own; recurrent layers are gated delta nets.
        window: tokens that a token attends to in layers of type window, itself included.
        recurrent_heads: of a rank in recurrent layers: key heads, value heads, and the size of a head of each.
        nano_batches: 1, or 2 for ping and pong.
        resend: plan the backward on its own, as pipelines need.
        tolerance: how far above the mean the slowest server may be; by default what training takes for so many.
        ranks_per_node: consecutive ranks that share NVLink; 0 when all do.
        cost_table: a measured cost table (JSON); without one the analytic H200 model is used.
        picture: file to draw who computes what for whom into, such as plan.png.
        tokenizer: of training data that is text: bytes, a tokenizer.json, or a model's folder that holds one.
        field: of each JSON object, or column of each table, that holds the document; text by default, with
            conversations messages.
        conversations: training data is conversations, which go through the folder's chat template.
        bad: what happens to documents that cannot be read or tokenized: error ends the command; skip leaves them out.
        json: print the figures as JSON, in seconds and bytes, in place of the table.
    """
    from distca.log import print_json, printer

    given = dict(locals())
    if (step := read_step(lengths)) is not None:
        _check_alone(lengths, given)
        printer().print(replanned(step))
        return
    check_least(1, ranks=ranks, tokens_per_rank=tokens_per_rank, layers=layers)
    check_least(0, servers=servers, seed=seed, ranks_per_node=ranks_per_node, window=window)
    check_least(1, nano_batches=nano_batches)
    check_most(2, nano_batches=nano_batches)
    check_most(_MOST, ranks=ranks, servers=servers, layers=layers, ranks_per_node=ranks_per_node, window=window)
    of_layers, recurrent = _kinds_of_layers(layer_types, window, layers)
    what = gated_delta_net(recurrent_heads)
    if not os.path.isfile(lengths) and ranks * tokens_per_rank > MOST_TOKENS:
        most = MOST_TOKENS // ranks
        raise OptionError(f"--tokens_per_rank is {tokens_per_rank}; with --ranks {ranks} it must be at most {most}.")
    if ranks_per_node and (ranks + servers) % ranks_per_node:
        raise OptionError(
            f"--ranks and --servers are {ranks} and {servers}, together not a multiple of --ranks_per_node "
            f"{ranks_per_node}; every node needs equally many."
        )
    if tolerance is None:
        tolerance = training_tolerance(ranks + servers)
    check_tolerance(tolerance)
    if picture is not None:
        check_picture(picture)
    cost = costs(cost_table, heads, kv_heads, head_dim)
    kinds, layer_kinds = numbered(of_layers)
    how: dict[str, Any] = {"tokenizer": tokenizer, "field": field, "conversations": conversations, "bad": bad}
    _check_read(lengths, how)
    documents = read_data(lengths, longest=ranks * tokens_per_rank, seed=seed, **how)
    if documents is None:
        documents = read_lengths(lengths, tokens=ranks * tokens_per_rank, seed=seed)
    else:
        documents = Sampler(documents, ranks, tokens_per_rank, micro_batches=1, seed=seed).next()[0].lengths
    made = plan_micro_batch(
        documents,
        ranks,
        cost,
        nano_batches=nano_batches,
        resend=resend,
        tolerance=tolerance,
        links=Links(ranks_per_node),
        kinds=kinds,
        costs=tuple(cost_of_kind(kind, cost) for kind in kinds),
        layer_kinds=(layer_kinds,),
        servers=servers,
        recurrent=bool(recurrent),
    )
    beside = RecurrentFigures.of(made, what, recurrent) if recurrent else None
    if json:
        print_json(figures(made, len(of_layers), beside))
    else:
        printer().print(summary(made, len(of_layers), beside))
    if picture is not None:
        with writing("picture", picture):
            draw(made, picture, lengths)
    if picture is not None and not json:
        printer().print(f"Picture written to {picture}.", soft_wrap=True)


def _kinds_of_layers(layer_types: str, window: int, layers: int | None) -> tuple[list[AttentionKind], int]:
    """The kind of every layer with attention, and the number of recurrent layers.

    Raises:
        OptionError: an unknown type, no layer with attention, or more types than layers; or a window without a layer of
            its type, or such a layer without a window.
    """
    types = [each.strip() for each in layer_types.split(",")]
    if not set(types) <= {"full", "window", "recurrent"}:
        raise OptionError(f"--layer_types is {layer_types!r}; it must be full, window and recurrent, comma-separated.")
    if set(types) == {"recurrent"}:
        raise OptionError(f"--layer_types is {layer_types!r}, without attention to plan; add full or window.")
    if layers is not None and layers < len(types):
        raise OptionError(f"--layers is {layers}, but --layer_types names {len(types)} layers; it must be no less.")
    if (window > 0) != ("window" in types):
        raise OptionError(
            f"--window is {window} with --layer_types {layer_types}; it must be at least 1 where a layer is of type "
            "window, and 0 elsewhere."
        )
    of_layers = [types[layer % len(types)] for layer in range(layers or len(types))]
    attention = [each for each in of_layers if each != "recurrent"]
    kinds = [AttentionKind(1.0, each) for each in windows_of(attention, window, len(attention))]
    return kinds, len(of_layers) - len(attention)


def _check_alone(path: str, given: Mapping[str, Any]) -> None:
    for name, parameter in signature(plan).parameters.items():
        if name != "lengths" and given[name] != parameter.default:
            raise OptionError(f"--{name} is given, but {path} is a step's file, with options of its own; leave it out.")


def _check_read(lengths: str, how: dict[str, object]) -> None:
    """Refuse how training data is read where there is none, or where its kind passes over it."""
    kind, _, path = lengths.partition(":")
    given = {name: value for name, value in how.items() if value not in ("bytes", "error", None, False)}
    if given and not (kind in DATA_KINDS and path):
        raise OptionError(f"--{next(iter(given))} is about training data, but {lengths!r} is none; leave it out.")
    for said in passed_over(kind, **given):
        raise OptionError(rename_parameters(said, {"source": "KIND"}.get))


def costs(cost_table: str | None, heads: int | None, kv_heads: int | None, head_dim: int | None) -> CostModel:
    """The measured table, with the heads it was measured with, or the analytic model of the given heads.

    Raises:
        OptionError: on a table together with heads, or one of layers with a window.
        PlanError: on an unusable table, or heads that do not fit together.
    """
    given = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    check_least(1, **given)
    check_most(_MOST, **given)
    named = [f"--{name}" for name, value in given.items() if value is not None]
    if cost_table is None:
        defaults = {"heads": 32, "kv_heads": 8, "head_dim": 128}
        return analytic_cost(**{name: given[name] or value for name, value in defaults.items()})
    if named:
        raise OptionError(
            f"--cost_table {cost_table} and {', '.join(named)} are both given, but a table counts for the heads that "
            "it was measured with; leave out one of them."
        )
    cost = load_table(cost_table)
    if cost.window:
        raise OptionError(
            f"--cost_table {cost_table} was measured for layers with a window of {cost.window:,}; give the table of "
            "layers without a window, from which windows are modelled."
        )
    return cost
