"""Refuses settings that HybridModels, models with recurrent layers, or those with output gates do not support.

*Recurrent layers* are gated delta nets and Mamba-2. A GPTModel has gated delta nets if its
``experimental_attention_variant`` is "gated_delta_net". A HybridModel has a *pattern* with one symbol for each layer:
"G" is a gated delta net, "M" Mamba-2, "*" attention, "-" an MLP, "E" experts.
*Output gates* are Megatron's ``attention_output_gate``.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch.nn import functional

from distca.errors import SupportError
from megatron_patches.model.model_options import MEGATRONS, ModelOptions
from megatron_patches.model.pattern import DELTA_NET, MAMBA, RECURRENT, check_pattern
from megatron_patches.model.recurrences import has_output_gate, has_recurrent_layers, is_recurrent
from megatron_patches.versions import has_gated_delta_net, installed_version

logger = logging.getLogger(__name__)

_READ_BY = {"plain_recurrent_norm": DELTA_NET, "step_min": MAMBA}
"""Model options that only one kind of recurrent layer reads, with the kind's letter in a pattern."""
_IN_HYBRID_MODELS = ("rotations", *_READ_BY)
_DELTA_NET_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def warn_of_recurrent_layers(config: TransformerConfig, pattern: str, device: torch.device) -> None:
    unproved = bool(pattern) or has_recurrent_layers(config) or has_output_gate(config)
    if unproved and device.type == "cuda" and dist.get_rank() == 0:
        logger.warning(
            "Whole hybrid models, and models with attention_output_gate, were compared with Megatron-Core on CPU ranks "
            "only; compare the first losses with Megatron-Core's losses."
        )


def check_hybrid(
    config: TransformerConfig, pattern: str, options: ModelOptions, disaggregate: bool, offload: bool
) -> None:
    """Raises SupportError for a setting that a HybridModel, recurrent layers or output gates do not support.

    A model option that only one kind of recurrent layer reads is refused too, unless ``pattern`` has such layers.

    ``pattern`` is empty for a GPTModel. ``disaggregate`` and ``offload`` are arguments of ``distca.CAD``.
    """
    delta_nets = has_recurrent_layers(config)
    _check_options(pattern, options)
    if not pattern and not delta_nets and not has_output_gate(config):
        return
    what = "experimental_attention_variant is 'gated_delta_net'" if delta_nets else "attention_output_gate is True"
    if pattern:
        what = f"hybrid_layer_pattern is {pattern!r}"
    recurrent = delta_nets or any(symbol in RECURRENT for symbol in pattern)
    tp = config.tensor_model_parallel_size
    # Key: the part of the message that names an unsupported setting. Value: whether the model has this setting.
    refused = {
        f"megatron-core is {installed_version()}: install 0.19": not has_gated_delta_net(),
        f"sequence_parallel is False with tensor_model_parallel_size {tp}: set sequence_parallel to True": (
            tp > 1 and not config.sequence_parallel
        ),
        f"pipeline_model_parallel_size is {config.pipeline_model_parallel_size}: set it to 1": (
            config.pipeline_model_parallel_size > 1 and not disaggregate
        ),
        "`disaggregate` is False: set it to True": not disaggregate and not pattern,
        "`offload` is True: set it to False": offload,
        "`model_options` are not the defaults: leave them out": options != MEGATRONS and not pattern,
        f"`model_options` have more than {', '.join(_IN_HYBRID_MODELS)}: leave the rest out": (
            replace(options, **{name: getattr(MEGATRONS, name) for name in _IN_HYBRID_MODELS}) != MEGATRONS
        ),
        f"num_moe_experts is {config.num_moe_experts}: set it to None": bool(config.num_moe_experts) and not pattern,
        # RoPE rotates pairs of elements: one from each half of a head, or with rotary_interleaved two neighbours.
        # Megatron's HybridModel orders the angles for halves even with rotary_interleaved.
        "rotary_interleaved is True: set it to False": bool(pattern) and config.rotary_interleaved,
    }
    if delta_nets:
        _check_stages(config)
        refused["experimental_attention_variant is 'gated_delta_net': set it to None"] = bool(pattern)
    if recurrent:
        refused |= {
            f"normalization is {config.normalization!r}: set it to 'RMSNorm'": config.normalization != "RMSNorm",
            "activation_func is not SiLU, the only one for delta nets: set it to torch.nn.functional.silu": (
                config.activation_func is not functional.silu and (delta_nets or DELTA_NET in pattern)
            ),
        }
    for other, found in refused.items():
        if found:
            raise SupportError(f"{what}, which is not supported where {other}, or leave {what.split()[0]} out.")
    if pattern:
        check_pattern(config, pattern)
    if delta_nets or DELTA_NET in pattern:
        _check_delta_net(config)


def _check_delta_net(config: TransformerConfig) -> None:
    """Refuses sizes of gated delta nets that are missing, or that cannot be divided evenly."""
    for name in _DELTA_NET_SIZES:
        if not getattr(config, name):
            raise SupportError(f"{name} is {getattr(config, name)}, but the model has gated delta nets: set {name}.")
    keys, values, tp = config.linear_num_key_heads, config.linear_num_value_heads, config.tensor_model_parallel_size
    assert keys and values
    if values % keys:
        raise SupportError(
            f"linear_num_value_heads is {values}, but must be a multiple of linear_num_key_heads {keys}: change one of "
            "the two."
        )
    if keys % tp:
        raise SupportError(
            f"linear_num_key_heads is {keys}, but must be a multiple of tensor_model_parallel_size {tp}: change one of "
            "the two."
        )


def _check_stages(config: TransformerConfig) -> None:
    """Refuses stages whose i-th layers differ in kind, attention or recurrent.

    The i-th layers of all stages run together."""
    recurrent = [is_recurrent(config, 1 + n) for n in range(config.num_layers)]
    stages = config.pipeline_model_parallel_size
    size = config.num_layers // stages
    if any(recurrent[n] != recurrent[n % size] for n in range(size * stages)):
        raise SupportError(
            f"linear_attention_freq is {config.linear_attention_freq!r}, which gives the {stages} stages of "
            "pipeline_model_parallel_size different kinds of layers, but the i-th layers of all stages must be of one "
            "kind: change linear_attention_freq or pipeline_model_parallel_size."
        )


def _check_options(pattern: str, options: ModelOptions) -> None:
    for name, symbol in _READ_BY.items():
        value = getattr(options, name)
        if value != getattr(MEGATRONS, name) and symbol not in pattern:
            raise SupportError(
                f"`{name}` is {value}, but hybrid_layer_pattern is {pattern!r}, and only layers with letter "
                f"{symbol} read `{name}`: leave it out."
            )
