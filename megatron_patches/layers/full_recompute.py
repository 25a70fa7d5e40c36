"""Megatron's full recomputation of its own layers, one layer at a time, for layers that know their documents.

Megatron's own (``recompute_granularity`` full) hands the attention mask to autograd as a tensor to save. Here a
micro-batch travels in its place, so it is held by the function that is called again instead.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer


def recompute_layers(block: TransformerBlock) -> None:
    """Keep only the input of every layer until backward, and compute the layer again then, core attention too.

    Args:
        block: of Megatron's own layers; changed in place.
    """
    for layer in block.layers:
        layer.forward = partial(_forward, layer, layer.forward)


def differentiable(hidden_states: torch.Tensor) -> torch.Tensor:
    """Returns the input of a part that is recomputed, with a gradient.

    Autograd runs the part's backward, for weights too, only if its input has a gradient. The output of a frozen
    embedding has none."""
    return hidden_states if hidden_states.requires_grad else hidden_states.detach().requires_grad_()


def _forward(layer: TransformerLayer, own: Any, hidden_states: torch.Tensor, **rest: Any) -> Any:
    if not torch.is_grad_enabled():
        return own(hidden_states=hidden_states, **rest)
    hidden_states = differentiable(hidden_states)

    def again(hidden: torch.Tensor) -> Any:
        return own(hidden_states=hidden, **rest)

    if layer.config.fp8:
        from megatron.core.extensions.transformer_engine import te_checkpoint

        # It keeps how tensors are scaled, so that backward scales them alike.
        tracker = tensor_parallel.random.get_cuda_rng_tracker
        return te_checkpoint(again, False, tracker, parallel_state.get_tensor_model_parallel_group(), hidden_states)
    return tensor_parallel.checkpoint(again, False, hidden_states)
