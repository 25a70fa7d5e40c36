"""Refuses weights whose gradients would not be reduced, or that the optimizer would not update.

``CAD.data_parallel`` wraps a model in Megatron's DistributedDataParallel. Its buffers hold ``main_grad`` of the weights
that required a gradient at that time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import unwrap_model

from distca.errors import SupportError
from megatron_patches.te.fp8_weights import is_fp8

_FUSED = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")
"""Names of an attribute of linear layers, in Megatron and in Transformer Engine. If it is True, backward adds the
weight's gradient to ``main_grad`` only."""


def check_gradients(gradients: torch.dtype, weights: torch.dtype) -> None:
    """Raises SupportError unless gradients are float32, or gradients and weights are both bfloat16."""
    if gradients != torch.float32 and not gradients == weights == torch.bfloat16:
        raise SupportError(
            f"`gradients` is {gradients} and the weights are {weights}; set `gradients` to torch.float32, or, for "
            "torch.bfloat16 weights, to torch.bfloat16."
        )


def check_fp8_weights(config: TransformerConfig, distributed_optimizer: bool) -> None:
    """Raises SupportError if ``fp8_param`` is True and ``distributed_optimizer`` is False."""
    if config.fp8_param and not distributed_optimizer:
        raise SupportError(
            "fp8_param is True, but Megatron keeps float32 copies of FP8 weights in its distributed optimizer only: "
            "set distributed_optimizer to True, or leave fp8_param out."
        )


def check_weights_before(model: torch.nn.Module, params_dtype: torch.dtype, device: torch.device) -> None:
    """Raises SupportError if a weight's type of device is not that of ``device``, or its dtype is not ``params_dtype``.

    If ``params_dtype`` is bfloat16, weights of any dtype pass, as Megatron casts them."""
    for name, weight in model.named_parameters():
        if weight.device.type != device.type:
            raise SupportError(
                f"{name} is on {weight.device}, but CAD is for {device}: move the model there before CAD.data_parallel."
            )
        if params_dtype != torch.bfloat16 and weight.dtype != params_dtype:
            raise SupportError(
                f"{name} has type {weight.dtype}, but the configuration's params_dtype is {params_dtype}: set "
                "params_dtype to the type for training, and build the model again without casting its weights."
            )


def check_trained_biases(model: torch.nn.Module) -> None:
    """Refuses biases that are trained beside a frozen weight, in layers where Megatron leaves out their gradients.

    Raises:
        SupportError: the message names the first such bias.
    """
    for name, module in model.named_modules():
        if isinstance(module, ColumnParallelLinear) and not module.skip_bias_add:
            bias, weight = module.bias, module.weight
            if bias is not None and weight is not None and bias.requires_grad and not weight.requires_grad:
                raise SupportError(
                    f"{name}.bias is trained and {name}.weight is frozen, but Megatron computes no gradient of a bias "
                    "whose weight is frozen: freeze both, or train both."
                )


def check_trained_weights(model: DistributedDataParallel) -> None:
    """Refuses trained weights that were frozen, unfrozen, added, replaced or removed after ``CAD.data_parallel``.

    It also refuses hooks on gradients that go to ``main_grad`` only. With a distributed optimizer it refuses weights in
    bfloat16 or float32 whose memory is outside Megatron's buffers.

    Raises:
        SupportError: the message names the first weight that is refused, or the shape of one that the model lost.
    """
    reduced = model.param_to_bucket_group
    for name, weight in model.named_parameters():
        if weight.requires_grad != (weight in reduced):
            what = "frozen" if weight in reduced else "added, replaced or unfrozen"
            raise SupportError(
                f"{_bare(name)} was {what} after CAD.data_parallel, but gradients are reduced for the weights "
                "that required them then: set requires_grad, and add or replace weights, before CAD.data_parallel."
            )
    held = set(model.parameters())
    for weight in reduced:
        if weight not in held:
            raise SupportError(
                f"A weight of shape {list(weight.shape)} was removed, or replaced by a frozen one, after "
                "CAD.data_parallel, but gradients are reduced for the weights that required them then: remove, replace "
                "and freeze weights before CAD.data_parallel."
            )
    _check_places(model)
    _check_hooks(model)


def _check_places(model: DistributedDataParallel) -> None:
    """Refuses weights outside Megatron's buffers, which the distributed optimizer would not update."""
    for buffer in model.buffers + model.expert_parallel_buffers:
        if buffer.param_data is None:
            continue
        here = buffer.param_data.untyped_storage().data_ptr()
        for weight in buffer.params:
            if not is_fp8(weight) and weight.untyped_storage().data_ptr() != here:
                raise SupportError(
                    f"{_name_of(model, weight)} has other memory than CAD.data_parallel gave it, and the distributed "
                    "optimizer would not update it: move and cast the model before CAD.data_parallel, and set weights "
                    "by weight.data.copy_."
                )


def _check_hooks(model: DistributedDataParallel) -> None:
    """Refuses hooks on gradients that go to ``main_grad`` only (``_FUSED``); a hook would get unwritten memory."""
    # Devices wait for this check in every step, and hooks are rare. So weights are looked at before modules.
    hooked = [
        weight
        for weight in model.param_to_bucket_group
        if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)
    ]
    for weight in _fused_weights(unwrap_model(model)) if hooked else ():
        if any(weight is each for each in hooked):
            raise SupportError(
                f"{_name_of(model, weight)} has a hook on its gradient, which would see memory that nobody wrote: the "
                "matrix product adds the gradient to main_grad (gradient_accumulation_fusion). Leave the hook out, and "
                "read or change main_grad after CAD.forward_backward."
            )


def _fused_weights(model: Any) -> Iterator[torch.nn.Parameter]:
    for module in model.modules():
        if any(getattr(module, name, False) for name in _FUSED):
            weight = getattr(module, "weight", None)
            if weight is None and model.share_embeddings_and_output_weights:  # the output layer has the embedding's
                weight = model.shared_embedding_or_output_weight()
            if isinstance(weight, torch.nn.Parameter):
                yield weight


def _name_of(model: DistributedDataParallel, weight: torch.nn.Parameter) -> str:
    return next(_bare(name) for name, each in model.named_parameters() if each is weight)


def _bare(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
