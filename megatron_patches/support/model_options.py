"""Refuses wrong ``model_options`` of ``distca.CAD``, and a GPTModel's rotary settings that no layer uses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, get_args

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from distca.errors import SupportError
from megatron_patches.model.model_options import MEGATRONS, ModelOptions, Norms, QueryKeyNorm, Rotary

_CHOICES = {"norms": Norms, "query_key_norm": QueryKeyNorm}
"""Options whose value is one of a few words, and the type that lists the words."""
_ABOVE_ZERO = ("embedding_scale", "residual_multiplier", "logit_multiplier")
_FROM_ZERO = ("score_softcap", "final_softcap", "step_min", "latent_norm_epsilon")


def check_model_options(options: ModelOptions, config: TransformerConfig) -> None:
    """Refuses options that have a wrong value, or conflict with each other or the configuration.

    Raises:
        SupportError: one or several options are refused; the message names one of them.
    """
    for sentence in (*_values(options), *_conflicts(options, config), *_rotations(options, config)):
        raise SupportError(sentence)


def check_own_rotary(model: GPTModel, options: ModelOptions) -> None:
    """Refuses rotary settings of a GPTModel that no layer uses.

    A layer uses them if ``rotations`` is empty or has None for the layer, and ``no_rope_freq`` does not skip the layer.
    A recurrent layer has no RoPE, but counts here like a layer with attention.

    Args:
        model: built with the configuration for which :func:`check_model_options` accepted ``options``.

    Raises:
        SupportError: no layer uses the model's frequencies, which are not the default.
    """
    config = model.config
    skipped = config.no_rope_freq or [0] * config.num_layers
    rotations = options.rotations or (None,) * config.num_layers
    if any(rotary is None and not skip for rotary, skip in zip(rotations, skipped, strict=True)):
        return
    own: Any = model.rotary_pos_emb
    default = RotaryEmbedding(config.kv_channels, 1.0, use_cpu_initialization=True).inv_freq
    plain = isinstance(own, RotaryEmbedding) and own.seq_len_interpolation_factor is None
    frequencies = own.inv_freq.cpu() if plain else torch.empty(0)
    if frequencies.shape != default.shape or not torch.allclose(frequencies, default):
        raise SupportError(
            "GPTModel was built with rotary positions that no layer would use, since `rotations` or no_rope_freq "
            "overrides them in every layer: leave GPTModel's arguments rotary_base, rotary_percent, rope_scaling and "
            "seq_len_interpolation_factor out, or set `rotations` to None, and no_rope_freq to 0, for layers that are "
            "to use GPTModel's positions."
        )


def _values(options: ModelOptions) -> Iterator[str]:
    for name, kind in _CHOICES.items():
        if getattr(options, name) not in get_args(kind):
            yield f"`{name}` is {getattr(options, name)!r}; it can be {', '.join(get_args(kind))}."
    for name in (*_ABOVE_ZERO, *_FROM_ZERO):
        value = getattr(options, name)
        if not math.isfinite(value) or value < 0 or (name in _ABOVE_ZERO and value == 0):
            yield f"`{name}` is {value}; it must be a number {'above 0' if name in _ABOVE_ZERO else 'from 0 on'}."
    scaling = options.query_scaling
    if scaling is not None and not (scaling.beta > 0 and scaling.original_length > 0):
        yield (
            f"`query_scaling` has beta {scaling.beta} and original_length {scaling.original_length}; both must be "
            "above 0, or leave query_scaling out."
        )


def _conflicts(options: ModelOptions, config: TransformerConfig) -> Iterator[str]:
    if not config.qk_layernorm:
        for name in ("query_key_norm", "norm_after_rotation"):
            if getattr(options, name) != getattr(MEGATRONS, name):
                yield (
                    f"`{name}` is {getattr(options, name)!r}, but qk_layernorm is False, so there are no norms of "
                    f"queries and keys: set qk_layernorm to True, or leave {name} out."
                )
    if options.query_key_norm == "width" and config.normalization != "RMSNorm":
        yield (
            f"`query_key_norm` is 'width', but normalization is {config.normalization!r}: one norm of all heads needs "
            "RMSNorm; set query_key_norm to 'head', a norm of each head."
        )
    if options.norm_after_rotation and options.query_scaling is not None:
        yield "`query_scaling` multiplies queries, but norm_after_rotation undoes this: set the latter to False."
    if not options.norm_bias and config.normalization == "RMSNorm":
        yield "`norm_bias` is False, but normalization is 'RMSNorm', which has no bias anyway: leave norm_bias out."
    if options.parallel_mlp and options.norms != "pre":
        yield (
            f"`parallel_mlp` is True, but `norms` is {options.norms!r}, and a parallel MLP reads the norm before "
            "attention: set norms to 'pre', or parallel_mlp to False."
        )
    for name in ("attention_output_bias", "mlp_bias"):
        if getattr(options, name) and config.add_bias_linear:
            yield f"`{name}` is True, but add_bias_linear gives all linear layers biases: leave one of these out."
    if options.mlp_bias and config.num_moe_experts:
        yield (
            "`mlp_bias` is True, but it gives experts no biases: leave mlp_bias out; add_bias_linear gives all linear "
            "layers biases."
        )
    if getattr(config, "use_mup", False) and options.final_softcap:
        yield "`final_softcap` is set, but it is not supported with use_mup's factor on logits: leave one of these out."


def _rotations(options: ModelOptions, config: TransformerConfig) -> Iterator[str]:
    if not options.rotations:
        return
    layers, skipped = config.num_layers, config.no_rope_freq or [0] * config.num_layers
    if len(options.rotations) != layers:
        yield f"`rotations` has {len(options.rotations)} entries, but the model has {layers} layers: give one for each."
        return
    for number, (rotary, skip) in enumerate(zip(options.rotations, skipped, strict=True)):
        if rotary is not None and skip:
            yield (
                f"`rotations[{number}]` gives a layer rotary positions, but no_rope_freq[{number}] says that the layer "
                f"has none: set `rotations[{number}]` to None, or no_rope_freq[{number}] to 0."
            )
        for problem in [] if rotary is None else _problems(rotary, config):
            yield f"`rotations[{number}]`: {problem}"


def _problems(rotary: Rotary, config: TransformerConfig) -> list[str]:
    """Returns sentences that begin with a field's name."""
    assert config.kv_channels is not None
    found = [f"scaling.{problem}" for problem in rotary.scaling.problems()]
    if not rotary.base > 0:
        found.append(f"base is {rotary.base}; it must be above 0.")
    dims = int(config.kv_channels * rotary.percent) if 0 < rotary.percent <= 1 else 0
    if dims == 0 or dims % 2:
        found.append(
            f"percent is {rotary.percent}; it must be at most 1 and rotate an even number of a head's "
            f"{config.kv_channels} elements, at least 2."
        )
    elif problem := rotary.scaling.frequencies_problem(dims):
        found.append(f"scaling.{problem}")
    return found
