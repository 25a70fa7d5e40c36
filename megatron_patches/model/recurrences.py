"""Reads from Megatron's configuration which layers are recurrent, and the formula and sizes of their recurrence.

A recurrent layer has a recurrence in place of softmax attention, such as the gated delta rule or Mamba-2's scan. A
:class:`Recurrence` is the formula between the layer's projections, with the sizes of its heads.

A GPTModel has recurrent layers with ``experimental_attention_variant`` "gated_delta_net". Then every
``linear_attention_freq``-th layer has attention and all others are recurrent. As a list, ``linear_attention_freq`` has
a 1 for each recurrent layer. A HybridModel names its recurrent layers in a pattern instead (``pattern.py``).
"""

from __future__ import annotations

from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from distca.errors import SupportError
from distca.recurrent import Recurrence


def has_recurrent_layers(config: TransformerConfig) -> bool:
    """Whether the configuration makes some of a GPTModel's layers gated delta nets."""
    return getattr(config, "experimental_attention_variant", None) == "gated_delta_net"


def has_output_gate(config: TransformerConfig) -> bool:
    """Whether the output of softmax attention is multiplied by a gate."""
    return bool(getattr(config, "attention_output_gate", False))


def is_recurrent(config: TransformerConfig, layer_number: int) -> bool:
    """Whether a GPTModel's layer is recurrent; Megatron's layer numbers begin with 1.

    Raises:
        SupportError: ``linear_attention_freq`` is neither a number from 2 on nor a list of a 1 or 0 for each layer.
    """
    if not has_recurrent_layers(config):
        return False
    every = config.linear_attention_freq
    if isinstance(every, int) and not isinstance(every, bool) and every > 1:
        return layer_number % every != 0
    if isinstance(every, list | tuple) and len(every) == config.num_layers and set(every) == {0, 1}:
        return bool(every[layer_number - 1])
    raise SupportError(
        f"linear_attention_freq is {every!r}, but the model has {config.num_layers} layers, of which some must have "
        "softmax attention: set it to a number N of 2 or more, so that every N-th layer has attention, or to a list "
        "with a 1 for each recurrent layer and a 0 for each other."
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


def mamba_recurrence(config: TransformerConfig) -> Recurrence:
    """Returns the recurrence of a layer of Mamba-2, for the heads of one tensor-parallel rank."""
    tp, heads = parallel_state.get_tensor_model_parallel_world_size(), config.mamba_num_heads
    if heads is None:
        heads = 2 * config.hidden_size // config.mamba_head_dim  # Megatron's default: inner width is twice the hidden
    groups, state = config.mamba_num_groups, config.mamba_state_dim
    return Recurrence.mamba2(groups // tp, heads // tp, state, config.mamba_head_dim)
