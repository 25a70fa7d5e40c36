"""FP8 in Transformer Engine's linear layers: the context in which a layer computes, and the scales of delayed scaling.

A tensor is multiplied by a scale before it is rounded to FP8. With *delayed* scaling the scale follows from the largest
absolute values (amax) of earlier steps. It stays the same during a step, so recomputation in backward rounds like
forward. At the step's end :func:`end_step` sets the next scales.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from distca.sizes.fp8_shapes import Fp8

_FIELDS: dict[Fp8, dict[str, Any]] = {
    "none": {},
    "current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "delayed": {
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_amax_history_len": 1024,  # a scale follows from the largest values of this many latest steps
        "fp8_amax_compute_algo": "max",
    },
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}

_unreduced = False
"""Whether a layer with delayed scaling has run since :func:`end_step` was last called."""


def config_fields(fp8: Fp8, weights: bool = False) -> dict[str, Any]:
    """Returns the fields of Megatron's configuration for a way of scaling to FP8.

    With ``weights``, the field ``fp8_param`` makes the model hold its weights in FP8, without bfloat16 copies.
    """
    return _FIELDS[fp8] | ({"fp8_param": True} if weights else {})


def fp8_of(config: TransformerConfig) -> Fp8:
    """Returns how Megatron's configuration scales tensors to FP8; "none" is no FP8.

    Raises:
        KeyError: ``fp8_recipe`` is a value that ``support/config_fields.py`` refuses.
    """
    if config.fp8 is None:
        return "none"
    names: dict[str, Fp8] = {"tensorwise": "current", "delayed": "delayed", "blockwise": "blockwise"}
    return names[config.fp8_recipe]


def name_fp8(config: TransformerConfig) -> str:
    """Returns the beginning of a message about FP8: Megatron's field for the way of scaling, and its value.

    Users' own scripts set this field. The trainer replaces both words in backquotes by its own setting and value: the
    message "`fp8_recipe` is `tensorwise`" becomes "train.fp8 is current".
    """
    return f"`fp8_recipe` is `{config.fp8_recipe}`"


def keeps_inputs(linear: Any) -> bool:
    """Whether a linear layer keeps its unrounded input for backward. Otherwise it keeps an FP8 copy."""
    return linear.config.fp8 is None or getattr(linear, "save_original_input", False)


def make_recipe(config: TransformerConfig) -> Any:
    from megatron.core.fp8_utils import get_fp8_recipe

    return get_fp8_recipe(config) if config.fp8 is not None else None


@contextmanager
def in_fp8(recipe: Any, config: TransformerConfig) -> Iterator[None]:
    """Makes one of Transformer Engine's layers compute in FP8 inside the ``with`` block.

    Nothing changes if an FP8 context is open already, for example one that Megatron opened around whole layers.

    Args:
        recipe: the scaling, from :func:`make_recipe`, or another recipe of Transformer Engine; None for no FP8.
        config: the model's configuration. Its ``tp_only_amax_red`` says over which ranks :func:`end_step` reduces amax.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

    if recipe is None or State.is_fp8_enabled():
        yield
        return
    group = parallel_state.get_amax_reduction_group(
        with_context_parallel=True, tp_only_amax_red=config.tp_only_amax_red
    )
    if recipe.delayed():
        global _unreduced
        _unreduced = True
        _autocast_arguments(State)[State.get_unique_autocast_key(recipe, group)] = (recipe, group)
    before = State.get_autocast_state()
    # Only end_step may set new scales. Transformer Engine's own context manager would also set them, and so would
    # backward of the layer if the fifth value (is_first_fp8_module) were True.
    State.set_autocast_state((True, False, recipe, group, False, False))
    try:
        yield
    finally:
        State.set_autocast_state(before)


def _autocast_arguments(manager: Any) -> dict[str, tuple[Any, Any]]:
    """Returns Transformer Engine's dictionary of recipes and groups, from which delayed scaling sets scales.

    It is an attribute of ``manager`` (FP8GlobalStateManager) in 2.11, and of ``manager.quantization_state`` in 2.20.
    """
    held: dict[str, tuple[Any, Any]] = getattr(manager, "quantization_state", manager).autocast_arguments
    return held


def end_step() -> None:
    """Reduces the largest values of a step over ranks, and sets the next scales of delayed scaling.

    All ranks call this function after the step's last backward. Without delayed scaling it does nothing.
    """
    global _unreduced
    if not _unreduced:
        return
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

    _unreduced = False
    with torch.no_grad():
        State.reduce_and_update_fp8_tensors(forward=True)
        State.reduce_and_update_fp8_tensors(forward=False)


def forget_layers() -> None:
    """Resets Transformer Engine's global state, which would keep closed process groups and scales of earlier models."""
    global _unreduced
    _unreduced = False
    if "transformer_engine.pytorch.quantization" in sys.modules:
        sys.modules["transformer_engine.pytorch.quantization"].FP8GlobalStateManager.reset()
