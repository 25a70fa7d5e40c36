"""Reads from Megatron's configuration which layers are recurrent, and what a recurrent layer computes.

A recurrent layer has the gated delta rule or Mamba-2's scan in place of softmax attention. A GPTModel has layers with
the gated delta rule if ``experimental_attention_variant`` is "gated_delta_net"; ``linear_attention_freq`` says where.
For a HybridModel, ``pattern.py`` says which layers are recurrent.
"""

from __future__ import annotations

from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from distca.errors import SupportError
from distca.recurrent import Recurrence


def has_recurrent_layers(config: TransformerConfig) -> bool:
    """Whether a GPTModel has layers with the gated delta rule.

    For a HybridModel, whose pattern says which layers are recurrent, ``support/hybrid.py`` refuses "gated_delta_net".
    """
    return getattr(config, "experimental_attention_variant", None) == "gated_delta_net"


def has_output_gate(config: TransformerConfig) -> bool:
    """Whether the output of softmax attention is multiplied by a gate."""
    return bool(getattr(config, "attention_output_gate", False))


def is_recurrent(config: TransformerConfig, layer_number: int) -> bool:
    """Whether layer ``layer_number`` (from 1) of a GPTModel is recurrent.

    Raises:
        SupportError: ``linear_attention_freq`` has a wrong form, or would make all layers recurrent or none.
    """
    if not has_recurrent_layers(config):
        return False
    every = config.linear_attention_freq
    if isinstance(every, int) and not isinstance(every, bool) and 1 < every <= config.num_layers:
        return layer_number % every != 0
    listed = isinstance(every, list | tuple) and len(every) == config.num_layers
    if listed and 0 in every and 1 in every and all(each in (0, 1) for each in every):
        return bool(every[layer_number - 1])
    if config.num_layers < 2:
        raise SupportError(
            f"linear_attention_freq is {every!r}, but num_layers is {config.num_layers}: beside recurrent layers a "
            "model needs layers with softmax attention; set num_layers to 2 or more."
        )
    raise SupportError(
        f"linear_attention_freq is {every!r}, but the model has {config.num_layers} layers, of which some must have "
        "softmax attention and some be recurrent. With a number N every N-th layer has attention: "
        f"set it to a number N from 2 to {config.num_layers}, or to a list with a 1 for each recurrent layer, else 0."
    )


def recurrence_of(config: TransformerConfig) -> Recurrence:
    """Returns the recurrence of a gated delta net, for the heads of one tensor-parallel rank."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    assert config.linear_num_key_heads and config.linear_num_value_heads and config.linear_conv_kernel_dim
    assert config.linear_key_head_dim and config.linear_value_head_dim
    return Recurrence.gated_delta_net(
        config.linear_num_key_heads // tp,
        config.linear_num_value_heads // tp,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
    )


def mamba_heads(config: TransformerConfig) -> int:
    """Returns ``mamba_num_heads``, or Megatron's default in place of None."""
    heads: int | None = config.mamba_num_heads
    return 2 * config.hidden_size // config.mamba_head_dim if heads is None else heads


def mamba_recurrence(config: TransformerConfig) -> Recurrence:
    """Returns the recurrence of a layer of Mamba-2, for the heads of one tensor-parallel rank."""
    tp, heads = parallel_state.get_tensor_model_parallel_world_size(), mamba_heads(config)
    groups, state = config.mamba_num_groups, config.mamba_state_dim
    return Recurrence.mamba2(groups // tp, heads // tp, state, config.mamba_head_dim)
