"""Reads from Megatron's configuration what each layer's attention or recurrence computes.

A *kind* of attention has a scale and a softcap of scores, a window of keys, and perhaps *sinks*: for each head a
learned score in the softmax that belongs to no key. A *recurrence* is the gated delta rule or Mamba-2's scan, which
some layers have in place of softmax attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.transformer import TransformerConfig

from distca.errors import SupportError
from distca.plan.kinds import AttentionKind, by_stage, numbered, usual_scale
from distca.recurrent import Recurrence
from megatron_patches.model.latent import is_latent, latent_scale
from megatron_patches.model.pattern import ATTENTION, DELTA_NET, MAMBA, RECURRENT, units_of
from megatron_patches.model.recurrences import mamba_recurrence, recurrence_of

_RECURRENCES = {DELTA_NET: recurrence_of, MAMBA: mamba_recurrence}


@dataclass(frozen=True)
class LayerKinds:
    """The recurrences of all layers of a model, and the kinds of attention. Recurrences have one rank's heads.

    In a GPTModel each layer is a *unit*. In a HybridModel a unit is an attention or recurrent layer, together with the
    MLPs and experts that follow. The first unit of a pipeline stage also has those ahead of that layer.

    Attributes:
        kinds: the distinct kinds of attention, in descending order of the number of keys that a query sees.
        of_layer: for each unit with attention, the index of its kind in ``kinds``.
        recurrences: for each unit its recurrence, or None for a unit with attention; empty if all have attention.
    """

    kinds: tuple[AttentionKind, ...]
    of_layer: tuple[int, ...]
    recurrences: tuple[Recurrence | None, ...] = ()

    @staticmethod
    def of(config: TransformerConfig, softcap: float = 0.0, pattern: str = "") -> LayerKinds:
        """Returns the kinds and recurrences of a configuration's layers.

        Args:
            softcap: c, if attention scores become c · tanh(score / c); 0 for none.
            pattern: the pattern of a HybridModel's layers; empty for a GPTModel.

        Raises:
            SupportError: ``window_size``, ``window_attn_skip_freq`` or ``linear_attention_freq`` has a wrong form, or
                ``linear_attention_freq`` would make all layers recurrent or none.
        """
        units = units_of(config, pattern)
        kinds = [kind_of_layer(config, unit.layer_number, softcap) for unit in units if unit.symbol == ATTENTION]
        recurrences = tuple(_RECURRENCES[each.symbol](config) if each.symbol in RECURRENT else None for each in units)
        return LayerKinds(*numbered(kinds), recurrences if any(recurrences) else ())

    def of_stages(self, stages: int) -> tuple[tuple[int, ...], ...]:
        """Returns ``of_layer``, cut into one tuple for each pipeline stage."""
        return by_stage(self.of_layer, stages)


def kind_of_layer(config: TransformerConfig, layer_number: int, softcap: float = 0.0) -> AttentionKind:
    """Returns the kind of attention of one layer.

    ``layer_number`` is counted from 1. ``softcap`` is as in :meth:`LayerKinds.of`.

    Raises:
        SupportError: ``window_size`` or ``window_attn_skip_freq`` has a wrong form.
    """
    scale = config.softmax_scale
    if is_latent(config):
        scale = latent_scale(config)
    elif scale is None:
        assert config.kv_channels is not None
        scale = usual_scale(config.kv_channels)
    sink = config.softmax_type == "learnable"
    return AttentionKind(scale, _window(config) if _has_window(config, layer_number) else 0, softcap, sink)


def _window(config: TransformerConfig) -> int:
    """Returns the number of keys that a query sees, the query's own key included; 0 for all keys."""
    size = config.window_size
    if size is None:
        return 0
    pair = tuple(size) if isinstance(size, tuple | list) else ()
    if len(pair) != 2 or pair[1] not in (0, -1) or not all(isinstance(each, int) for each in pair) or pair[0] < -1:
        raise SupportError(
            f"window_size is {size!r}, but a window must end with the query's own key: set window_size to (w - 1, 0) "
            "for windows of w keys, or to None."
        )
    return pair[0] + 1


def _has_window(config: TransformerConfig, layer_number: int) -> bool:
    every = config.window_attn_skip_freq
    if config.window_size is None:
        return False
    if every is None:
        return True
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return layer_number % every != 0
    if isinstance(every, list | tuple) and len(every) == config.num_layers and all(each in (0, 1) for each in every):
        return bool(every[layer_number - 1])
    raise SupportError(
        f"window_attn_skip_freq is {every!r}, but the model has {config.num_layers} layers: set it to a number N, so "
        "that every N-th layer has no window, or to a list with a 1 for each layer with a window, and a 0 for each "
        "other layer."
    )
