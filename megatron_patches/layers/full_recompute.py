"""Megatron's full recomputation of its own layers, one layer at a time, for layers that know their documents.

Megatron's own (``recompute_granularity`` full) gives the attention mask to autograd to save as a tensor. Here it is no
tensor but a micro-batch. So the function that is called again in backward holds it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer


def recompute_layers(block: TransformerBlock) -> None:
    """Makes a block keep only the input of every layer until backward, which computes the layer again, with core
    attention.

    Args:
        block: a block of Megatron's own layers; it is changed in place.
    """
    for layer in block.layers:
        layer.forward = partial(_forward, layer, layer.forward)


def differentiable(hidden_states: torch.Tensor) -> torch.Tensor:
    """Returns the input of a recomputed part as a tensor that requires a gradient.

    Autograd runs the part's backward, for weights too, only if its input requires one. The output of a frozen embedding
    does not."""
    return hidden_states if hidden_states.requires_grad else hidden_states.detach().requires_grad_()


def _forward(layer: TransformerLayer, own: Any, hidden_states: torch.Tensor, **rest: Any) -> Any:
    if not torch.is_grad_enabled():
        return own(hidden_states=hidden_states, **rest)
    hidden_states = differentiable(hidden_states)

    def again(hidden: torch.Tensor) -> Any:
        return own(hidden_states=hidden, **rest)

    if layer.config.fp8:
        from megatron.core.extensions.transformer_engine import te_checkpoint

        # Transformer Engine's checkpoint keeps the scales of FP8 tensors, so that backward uses the same ones.
        tracker = tensor_parallel.random.get_cuda_rng_tracker
        return te_checkpoint(again, False, tracker, parallel_state.get_tensor_model_parallel_group(), hidden_states)
    return tensor_parallel.checkpoint(again, False, hidden_states)
