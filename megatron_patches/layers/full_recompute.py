"""Full recomputation of GPTModels, for ``distca.CAD(disaggregate=False, recompute="all")``.

Megatron's ``recompute_granularity="full"`` would, without FP8, pass ``attention_mask`` to autograd's
``save_for_backward``, which takes only tensors. In this project the mask is an object that describes the micro-batch,
so a closure holds it.

With disaggregation, ``block.py`` recomputes layers without their core attention. Without disaggregation,
``hybrid_stack.py`` recomputes the layers of HybridModels. Both files call only :func:`differentiable` of this file, and
so does code that recomputes only MLPs or experts. For the recomputed MLPs of Megatron's own layers,
:func:`train_recomputed_mlps` makes layers call it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer


def recompute_layers(block: TransformerBlock) -> None:
    """Changes a block in place, so that backward computes every layer again, including core attention."""
    for layer in block.layers:
        layer.forward = partial(_forward, layer, layer.forward)


def train_recomputed_mlps(block: TransformerBlock) -> None:
    """Changes Megatron's own layers in place: recomputed MLPs get gradients also if all weights before are frozen."""
    for layer in block.layers:
        if layer.recompute_mlp:
            layer.forward = partial(_differentiable_forward, layer, layer.forward)


def differentiable(hidden_states: torch.Tensor) -> torch.Tensor:
    """Returns the same values as a tensor that requires a gradient.

    Autograd skips the backward of a checkpointed function if none of its inputs requires a gradient. With a frozen
    embedding, no layer would then get gradients.
    """
    return hidden_states if hidden_states.requires_grad else hidden_states.detach().requires_grad_()


def _differentiable_forward(layer: TransformerLayer, own: Any, hidden_states: torch.Tensor, **rest: Any) -> Any:
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in layer.mlp.parameters()):
        hidden_states = differentiable(hidden_states)
    return own(hidden_states=hidden_states, **rest)


def _forward(layer: TransformerLayer, own: Any, hidden_states: torch.Tensor, **rest: Any) -> Any:
    """Runs ``own``, the layer's original forward. Backward runs ``own`` once more."""
    if not torch.is_grad_enabled():
        return own(hidden_states=hidden_states, **rest)
    hidden_states = differentiable(hidden_states)

    def again(hidden: torch.Tensor) -> Any:
        return own(hidden_states=hidden, **rest)

    if layer.config.fp8:
        from megatron.core.extensions.transformer_engine import te_checkpoint

        # Transformer Engine's checkpoint uses the same FP8 scales in the second computation.
        tracker = tensor_parallel.random.get_cuda_rng_tracker
        return te_checkpoint(again, False, tracker, parallel_state.get_tensor_model_parallel_group(), hidden_states)
    return tensor_parallel.checkpoint(again, False, hidden_states)
