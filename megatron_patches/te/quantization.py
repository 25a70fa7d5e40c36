"""FP8 in Transformer Engine's linear layers: the context in which they compute, and the scales of delayed scaling.

Megatron's own blocks open an FP8 context around each layer, or around all of them. In disaggregated layers, linear
layers run once per nano-batch, and again where they are recomputed; so each opens a context itself. Scales of delayed
scaling stay the same during a step, so that recomputation uses the same ones. At its end the largest values of all its
micro-batches are reduced over ranks, and set the next scales.
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
        # A scale follows from the largest values of this many steps; it is Transformer Engine's default. With
        # Megatron's own layers it is this many micro-batches, and recomputed products count once more.
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
    },
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}

_unreduced = False


def config_fields(fp8: Fp8, weights: bool = False) -> dict[str, Any]:
    """Returns the fields of megatron's configuration for a scaling to FP8. ``weights`` adds the field that keeps
    weights in FP8 only, without a bfloat16 copy."""
    return _FIELDS[fp8] | ({"fp8_param": True} if weights else {})


def fp8_of(config: TransformerConfig) -> Fp8:
    """Returns how a served configuration scales tensors to FP8."""
    if config.fp8 is None:
        return "none"
    names: dict[str, Fp8] = {"tensorwise": "current", "delayed": "delayed", "blockwise": "blockwise"}
    return names[config.fp8_recipe]


def keeps_inputs(linear: Any) -> bool:
    """Whether a linear layer keeps its input itself for backward, and not an FP8 copy of it."""
    return linear.config.fp8 is None or getattr(linear, "save_original_input", False)


def make_recipe(config: TransformerConfig) -> Any:
    """Returns Transformer Engine's recipe for a configuration; None without FP8."""
    from megatron.core.fp8_utils import get_fp8_recipe

    return get_fp8_recipe(config) if config.fp8 is not None else None


@contextmanager
def in_fp8(recipe: Any, config: TransformerConfig) -> Iterator[None]:
    """Makes one of Transformer Engine's layers compute in FP8 inside the block, unless it does already.

    Args:
        recipe: from :func:`make_recipe`.
        config: the layer's configuration.
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
    # In Transformer Engine's own context scales change when it is left, and in backward of the first layer entered. The
    # last but one False makes this layer no first one, and the context is not its own. So scales change in end_step.
    State.set_autocast_state((True, False, recipe, group, False, False))
    try:
        yield
    finally:
        State.set_autocast_state(before)


def _autocast_arguments(manager: Any) -> dict[str, tuple[Any, Any]]:
    """Returns by key the recipe and the group with which scales of delayed scaling are updated.

    Args:
        manager: FP8GlobalStateManager. In 2.11 it holds them itself; in 2.20 they are in a state that a reset replaces.
    """
    held: dict[str, tuple[Any, Any]] = getattr(manager, "quantization_state", manager).autocast_arguments
    return held


def end_step() -> None:
    """Reduces the largest values of a step over the ranks of their group, and sets scales of delayed scaling from them;
    all ranks call it after the step's last backward."""
    global _unreduced
    if not _unreduced:
        return
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

    _unreduced = False
    with torch.no_grad():
        State.reduce_and_update_fp8_tensors(forward=True)
        State.reduce_and_update_fp8_tensors(forward=False)


def forget_layers() -> None:
    """Drops the largest values of layers that are gone, and the groups that they were reduced over."""
    global _unreduced
    _unreduced = False
    if "transformer_engine.pytorch.quantization" in sys.modules:
        sys.modules["transformer_engine.pytorch.quantization"].FP8GlobalStateManager.reset()
