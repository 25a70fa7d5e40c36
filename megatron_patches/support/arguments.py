"""Checks of the arguments of :meth:`megatron_patches.api.CAD.data_parallel`."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig

from distca.errors import SupportError


def check_gradients(gradients: torch.dtype, weights: torch.dtype) -> None:
    """Refuses types in which gradients cannot be added up.

    Raises:
        SupportError: the arguments do not go together.
    """
    if gradients != torch.float32 and not gradients == weights == torch.bfloat16:
        raise SupportError(
            f"`gradients` is {gradients} and the weights are {weights}; gradients are added up in torch.float32, or, "
            "of torch.bfloat16 weights, in torch.bfloat16."
        )


def check_fp8_weights(config: TransformerConfig, distributed_optimizer: bool) -> None:
    """Refuses FP8 weights without the optimizer that has main weights for them.

    Raises:
        SupportError: the arguments do not go together.
    """
    if config.fp8_param and not distributed_optimizer:
        raise SupportError(
            "fp8_param is True, but Megatron holds the main weights of FP8 weights in its distributed optimizer only: "
            "set distributed_optimizer to True, or leave fp8_param out."
        )
