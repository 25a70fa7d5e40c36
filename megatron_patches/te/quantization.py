"""When Transformer Engine's linear layers compute in FP8, and when the scales of delayed scaling move on.

Megatron's own blocks open an FP8 context around each layer, or around all of them. In disaggregated layers linear
layers run twice per micro-batch and again where they are recomputed, so each opens one itself. Scales of delayed
scaling are the same in all of a step, and so where it is recomputed: the largest values of all its micro-batches are
reduced over ranks at its end.
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
from megatron_patches.te.versions import autocast_arguments

_FIELDS: dict[Fp8, dict[str, Any]] = {
    "none": {},
    "current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "delayed": {
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        # Of steps; where Megatron's own layers run, of micro-batches, and of every product where they are recomputed.
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
    },
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}

_unreduced = False


def config_fields(fp8: Fp8, weights: bool = False) -> dict[str, Any]:
    """Fields of megatron's configuration that ask for it; ``weights``: and for weights that are FP8 numbers alone."""
    return _FIELDS[fp8] | ({"fp8_param": True} if weights else {})


def fp8_of(config: TransformerConfig) -> Fp8:
    """How a served configuration scales tensors to FP8."""
    if config.fp8 is None:
        return "none"
    names: dict[str, Fp8] = {"tensorwise": "current", "delayed": "delayed", "blockwise": "blockwise"}
    return names[config.fp8_recipe]


def keeps_inputs(linear: Any) -> bool:
    """Whether a linear layer keeps its input for backward as it is given, and no FP8 copy of it."""
    return linear.config.fp8 is None or getattr(linear, "save_original_input", False)


def make_recipe(config: TransformerConfig) -> Any:
    """Transformer Engine's recipe of a configuration; None without FP8."""
    from megatron.core.fp8_utils import get_fp8_recipe

    return get_fp8_recipe(config) if config.fp8 is not None else None


@contextmanager
def in_fp8(recipe: Any, config: TransformerConfig) -> Iterator[None]:
    """Let one of Transformer Engine's layers compute in FP8, unless it does already.

    Args:
        recipe: from :func:`make_recipe`.
        config: of the layer.
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
        autocast_arguments(State)[State.get_unique_autocast_key(recipe, group)] = (recipe, group)
    before = State.get_autocast_state()
    # Its own context would reduce and update scales when it is left; and here no layer counts as the first one, whose
    # backward would do so.
    State.set_autocast_state((True, False, recipe, group, False, False))
    try:
        yield
    finally:
        State.set_autocast_state(before)


def end_step() -> None:
    """Reduce the largest values of a step, of delayed scaling, over the ranks of its group, and scale by them from now
    on; every rank calls it after the step's last backward."""
    global _unreduced
    if not _unreduced:
        return
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

    _unreduced = False
    with torch.no_grad():
        State.reduce_and_update_fp8_tensors(forward=True)
        State.reduce_and_update_fp8_tensors(forward=False)


def forget_layers() -> None:
    """Forget the largest values of layers that are gone, and the groups that they were reduced over."""
    global _unreduced
    _unreduced = False
    if "transformer_engine.pytorch.quantization" in sys.modules:
        sys.modules["transformer_engine.pytorch.quantization"].FP8GlobalStateManager.reset()
