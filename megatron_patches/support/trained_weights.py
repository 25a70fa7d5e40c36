"""Checks of a trained model's weights: that their gradients are reduced, and that the optimizer reaches them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model

from distca.errors import SupportError
from megatron_patches.te.fp8_weights import is_fp8

_FUSED = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")
"""The fields of Megatron's and Transformer Engine's linear layers that tell whether a product adds up gradients."""


def check_weights_before(model: torch.nn.Module, params_dtype: torch.dtype, device: torch.device) -> None:
    """Refuses weights of another type, or on another device, than those that CAD was made for, before they are wrapped.

    Args:
        model: the model; where the configuration says bf16, Megatron casts it later.
        params_dtype: the configuration's ``params_dtype``.
        device: the CAD's device.

    Raises:
        SupportError: a weight is refused; it names the first.
    """
    for name, weight in model.named_parameters():
        if weight.device.type != device.type:
            raise SupportError(
                f"{name} is on {weight.device}, but the CAD on {device}: move the model there before CAD.data_parallel."
            )
        if params_dtype != torch.bfloat16 and weight.dtype != params_dtype:
            raise SupportError(
                f"{name} has type {weight.dtype}, but the configuration's params_dtype is {params_dtype}: cast no "
                "weights, and set params_dtype to the type that is to be trained with."
            )


def check_trained_weights(model: DistributedDataParallel) -> None:
    """Refuses weights that were frozen, set free to learn, replaced or moved after CAD.data_parallel, and hooks on
    gradients that are only in ``main_grad``.

    Raises:
        SupportError: a weight is refused; it names the first.
    """
    reduced = model.param_to_bucket_group
    for name, weight in model.named_parameters():
        if weight.requires_grad != (weight in reduced):
            what = "frozen" if weight in reduced else "added, replaced or set free to learn"
            raise SupportError(
                f"{_bare(name)} was {what} after CAD.data_parallel, which decides whose gradients are reduced: set "
                "requires_grad, and add or replace weights, before CAD.data_parallel."
            )
    _check_places(model)
    _check_hooks(model)


def _check_places(model: DistributedDataParallel) -> None:
    """Refuses weights in other memory than Megatron's buffers, which alone its distributed optimizer updates."""
    for buffer in model.buffers + model.expert_parallel_buffers:
        if buffer.param_data is None:
            continue
        here = buffer.param_data.untyped_storage().data_ptr()
        for weight in buffer.params:
            if not is_fp8(weight) and weight.untyped_storage().data_ptr() != here:
                raise SupportError(
                    f"{_name_of(model, weight)} has other memory than CAD.data_parallel gave it, which the distributed "
                    "optimizer would not reach: move and cast the model before, and copy into weights "
                    "(weight.data.copy_)."
                )


def _check_hooks(model: DistributedDataParallel) -> None:
    for weight in _fused_weights(unwrap_model(model)):
        if weight.requires_grad and (weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)):
            raise SupportError(
                f"{_name_of(model, weight)} has a hook on its gradient, which would see memory that nobody wrote: the "
                "matrix product adds the gradient to main_grad (gradient_accumulation_fusion). Leave the hook out, and "
                "read or change main_grad after CAD.forward_backward."
            )


def _fused_weights(model: Any) -> Iterator[torch.nn.Parameter]:
    for module in model.modules():
        if any(getattr(module, name, False) for name in _FUSED):
            weight = getattr(module, "weight", None)
            if weight is None and model.share_embeddings_and_output_weights:  # the output layer's
                weight = model.shared_embedding_or_output_weight()
            if isinstance(weight, torch.nn.Parameter):
                yield weight


def _name_of(model: DistributedDataParallel, weight: torch.nn.Parameter) -> str:
    return next(_bare(name) for name, each in model.named_parameters() if each is weight)


def _bare(name: str) -> str:
    """Returns the name that a weight has in the GPTModel."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
