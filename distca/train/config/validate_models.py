"""Settings of models that cannot work: sizes, and those of experts, hybrid stacks and latent attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from distca.models.beside_latent import LATENT, not_with_latent
from distca.models.hybrid import DELTA_NET, EXPERTS, RECURRENT
from distca.models.shape import ModelShape
from distca.models.variant import Variant
from distca.sizes.head_dims import unserved
from distca.train.config.initial import first_scaling
from distca.train.config.schema import ModelConfig, RunConfig
from distca.words import count, in_words, not_served


def model_problems(config: RunConfig, vocabulary: int | None) -> list[str]:
    """Sentences on what cannot work, whatever the number of ranks; ``vocabulary`` is the data's, where it is known."""
    problems = _sizes(config, vocabulary) + _experts(config)
    return problems + _hybrid(config) + _latent(config)


def _sizes(config: RunConfig, vocabulary: int | None) -> list[str]:
    """The model's sizes, also over tensor-parallel ranks."""
    model, tp = config.model, config.parallel.tp
    problems = _heads(model) + _layer_types(model)
    if vocabulary is not None and model.vocabulary and model.vocabulary < vocabulary:
        remedy = "raise it, or set it to 0"
        if config.checkpoint.init_from:
            remedy = _remedy_of_folder(config)
        problems.append(f"model.vocabulary is {model.vocabulary}, but the data uses {vocabulary} tokens; {remedy}.")
    sizes = {name: getattr(model, name) for name in ("hidden", "ffn", "heads", "kv_heads")}
    if all(kind.mlp.experts.count for kind in model.layer_kinds):
        del sizes["ffn"]  # of dense layers alone
    for name, size in sizes.items():
        if size % tp:
            problems.append(f"model.{name} {size} is not divisible by parallel.tp {tp}; change one.")
    scaling = model.rope_scaling.problems() + model.rope_scaling.unused(first_scaling(config))
    if wrong := model.rope_scaling.frequencies_problem(int(model.resolved_head_dim * model.variant.rotary_percent)):
        scaling.append(wrong)
    problems += [f"model.rope_scaling.{problem}" for problem in scaling]
    return problems + [f"model.variant.{problem}" for problem in model.variant.problems(model.layers)] + _variant(model)


def _remedy_of_folder(config: RunConfig) -> str:
    """Returns the remedy for a tokenizer with more tokens than a folder's embedding."""
    folder, tokenizer = Path(str(config.checkpoint.init_from)), Path(config.data.tokenizer)
    if folder in (tokenizer, tokenizer.parent):
        return (
            f"{tokenizer} is the model's own, but its embedding has no rows for all of them: take tokens that were "
            "added out of its tokenizer.json, or give the embedding more rows (resize_token_embeddings of transformers)"
        )
    return "it is that of checkpoint.init_from, so use the tokenizer of that folder"


def _heads(model: ModelConfig) -> list[str]:
    problems: list[str] = []
    if model.latent.kv_rank:  # which has widths of its own
        return problems
    if model.head_dim == 0 and model.hidden % model.heads:
        problems.append(
            f"model.hidden {model.hidden} is not divisible by model.heads {model.heads}; "
            "change one or set model.head_dim."
        )
    elif why := unserved(model.resolved_head_dim):
        problems.append(f"The head dimension is {why}; change model.head_dim, or model.hidden or model.heads.")
    if model.heads % model.kv_heads:
        problems.append(f"model.heads {model.heads} is not divisible by model.kv_heads {model.kv_heads}; change one.")
    return problems


def _variant(model: ModelConfig) -> list[str]:
    """Returns a sentence for each part of model.variant that the rest of the model does not go with."""
    variant, usual, problems = model.variant, Variant(), []
    for name in () if model.qk_norm else ("query_key_norm", "norm_after_rotation"):
        if (value := getattr(variant, name)) != getattr(usual, name):
            problems.append(
                f"model.variant.{name} is {in_words(value)}, but model.qk_norm is false, so queries and keys have no "
                f"norms; set model.qk_norm to true, or model.variant.{name} to {in_words(getattr(usual, name))}."
            )
    turned = int(model.resolved_head_dim * variant.rotary_percent)
    if 0 < variant.rotary_percent < 1 and (turned % 2 or not turned):
        problems.append(
            f"model.variant.rotary_percent is {variant.rotary_percent:g}, by which positions turn {turned} of a head's "
            f"{model.resolved_head_dim} dimensions, but they turn an even number, at least 2; change it."
        )
    return problems


def _layer_types(model: ModelConfig) -> list[str]:
    """Returns a sentence for each problem with the types of layers and their window."""
    types, problems = model.layer_types, []
    if not 1 <= len(types) <= model.layers:
        problems.append(
            f"model.layer_types has {len(types)} types, but the model has {model.layers} layers; "
            f"give 1 to {model.layers}."
        )
    if "window" in types and model.window < 1:
        problems.append(
            f"model.layer_types has layers of type window, but model.window is {model.window}; set it to the tokens "
            "that a token attends to there, 1 or more."
        )
    if "window" not in types and model.window:
        problems.append(
            f"model.window is {model.window}, but no layer is of type window; name them in model.layer_types, or set "
            "model.window to 0."
        )
    return problems


def _experts(config: RunConfig) -> list[str]:
    experts, parallel = config.model.experts, config.parallel
    problems = [f"model.experts.{problem}" for problem in experts.problems(config.model.layers)]
    if not experts.count:
        if parallel.ep > 1:
            problems.append(
                f"parallel.ep is {parallel.ep}, but the model has no experts; set it to 1, or model.experts.count to "
                "a multiple of it."
            )
        return problems
    if experts.count % parallel.ep:
        problems.append(
            f"parallel.ep is {parallel.ep}, which does not divide the {experts.count} experts of a layer "
            "(model.experts.count), but each rank has equally many; change one."
        )
    if experts.shared_ffn % parallel.tp:
        problems.append(
            f"model.experts.shared_ffn {experts.shared_ffn} is not divisible by parallel.tp {parallel.tp}; change one."
        )
    if experts.biases and not (config.model.qkv_bias and config.model.variant.attention_output_bias):
        problems.append(
            "model.experts.biases is true, but the projections of attention have none; set model.qkv_bias and "
            "model.variant.attention_output_bias to true."
        )
    if parallel.tp > 1 and not parallel.sequence_parallel:
        problems.append(
            f"parallel.sequence_parallel is false with parallel.tp {parallel.tp}, but each rank sends rows of its own "
            "to the experts; set it to true, or parallel.tp to 1."
        )
    return problems + _dense_only(config)


def _dense_only(config: RunConfig) -> list[str]:
    """Sentences on what dense models can do, and models with experts cannot."""
    found: dict[str, tuple[object, object, str]] = {
        "model.variant.activation": (config.model.variant.activation, "silu", "experts are computed with silu"),
        "model.variant.gated": (config.model.variant.gated, True, "experts have gates"),
        "model.variant.mlp_bias": (config.model.variant.mlp_bias, False, "it gives experts no biases"),
        "train.fp8": (config.train.fp8, "none", "experts are computed in the type of their weights"),
        "train.offload": (
            "none" if config.train.offload == "auto" else config.train.offload,
            "none",
            "what experts keep for backward is not moved to host memory",
        ),
    }
    return [
        f"{setting} is {in_words(value)}, but {why}; set it to {in_words(served)}, or model.experts.count to 0."
        for setting, (value, served, why) in found.items()
        if value != served
    ]


def expert_ranks_problems(config: RunConfig, world_size: int) -> list[str]:
    """Sentences on what cannot work with so many ranks, which tensor parallelism and stages divide."""
    parallel = config.parallel
    ranks = world_size // parallel.pp
    if ranks % parallel.ep == 0:
        return []
    stage = f"the {count(ranks, 'rank')}" if parallel.pp == 1 else f"the {count(ranks, 'rank')} of a pipeline stage"
    return [
        f"parallel.ep is {parallel.ep}, which does not divide {stage}; give a divisor, or start another number of "
        "ranks."
    ]


def _hybrid(config: RunConfig) -> list[str]:
    hybrid, model, tp = config.model.hybrid, config.model, config.parallel.tp
    problems = [f"model.hybrid.{problem}" for problem in hybrid.problems(model.layers)]
    if not hybrid.pattern or problems:
        return problems
    if (EXPERTS in hybrid.pattern) != bool(model.experts.count):
        problems.append(
            f"model.experts.count is {model.experts.count}, but model.hybrid.pattern is {hybrid.pattern!r}; give "
            "experts where it has E, and none where it has not."
        )
    stages = hybrid.of_stages(model.layers, config.parallel.pp).split("|")
    if len({*stages}) > 1:
        problems.append(
            f"model.hybrid.pattern is {hybrid.pattern!r}, which gives the {config.parallel.pp} stages of parallel.pp "
            f"unlike layers ({' and '.join(dict.fromkeys(stages))}); change one, so that all have the same."
        )
    if {*RECURRENT} & {*hybrid.pattern} and hybrid.key_heads % tp:
        problems.append(f"model.hybrid.key_heads {hybrid.key_heads} is not divisible by parallel.tp {tp}; change one.")
    return problems + _not_in_hybrid_stacks(config)


def _not_in_hybrid_stacks(config: RunConfig) -> list[str]:
    """Sentences on what other models can do, and hybrid stacks cannot yet."""
    model, train, hybrid = config.model, config.train, config.model.hybrid
    variant = model.variant
    known = {name: getattr(variant, name) for name in ("activation", "gated", "zero_centered_norms", "rotary_percent")}
    found: dict[str, tuple[object, object]] = {
        "parallel.pp": (1 if config.cad.enabled else config.parallel.pp, 1),
        "parallel.sequence_parallel": (config.parallel.sequence_parallel or config.parallel.tp == 1, True),
        "train.offload": ("none" if train.offload == "auto" else train.offload, "none"),
        "train.fp8": (train.fp8, "none"),
        "model.layer_types": (model.layer_types, ["full"]),
        "model.sinks": (model.sinks, False),
        "model.experts.dense_layers": (model.experts.dense_layers, 0),
    }
    if not hybrid.rotate:
        found["model.rope_scaling.kind"] = model.rope_scaling.kind, "none"
        found["model.rope_base"] = model.rope_base, ModelShape.rope_base
    if DELTA_NET in hybrid.pattern:
        found["model.variant.activation"] = (variant.activation, "silu")
    problems = [
        f"{setting} is {in_words(value)}, which is not served with model.hybrid.pattern; set it to {in_words(served)}."
        for setting, (value, served) in found.items()
        if value != served
    ]
    if replace(Variant(), **known) != variant:
        problems.append(
            "model.variant has more than activation, gated, zero_centered_norms and rotary_percent, which is not "
            "served with model.hybrid.pattern; leave it out."
        )
    return problems


def _latent(config: RunConfig) -> list[str]:
    latent, model = config.model.latent, config.model
    problems = [f"model.latent.{problem}" for problem in latent.problems()]
    if not latent.kv_rank:
        return problems
    if model.kv_heads != model.heads:
        problems.append(
            f"model.kv_heads is {model.kv_heads}, but with model.latent every head has keys and values; set it to "
            f"model.heads, {model.heads}."
        )
    if model.head_dim not in (0, latent.head_dim):
        problems.append(
            f"model.head_dim is {model.head_dim}, but model.latent.key_dim and rotary_dim make it {latent.head_dim}; "
            "leave it out."
        )
    if problem := latent.scaling_problem(model.rope_scaling):
        problems.append(f"model.rope_scaling.{problem}")
    return problems + _not_with_latent_attention(config)


def _not_with_latent_attention(config: RunConfig) -> list[str]:
    """Sentences on what other models can do, and those with latent attention cannot yet."""
    parallel = config.parallel
    found: dict[str, tuple[object, tuple[object, ...]]] = {
        "parallel.sequence_parallel": (parallel.sequence_parallel or parallel.tp == 1, (True,)),
        "train.fp8": (config.train.fp8, ("none",)),
        "train.linears": (config.train.linears, ("auto", "local")),
    }
    return [f"model.{each}" for each in not_with_latent(config.model)] + not_served(found, LATENT)
