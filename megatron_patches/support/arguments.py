"""What a user gives :class:`megatron_patches.api.CAD` beside Megatron's configuration."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Literal, get_args

import torch
from megatron.core.transformer import TransformerConfig

from distca.errors import SupportError
from megatron_patches.plan_options import Level
from megatron_patches.te.choice import Linears

Backward = Literal["auto", "keep", "resend"]
Recompute = Literal["none", "all"]

_CHOICES = {"backward": Backward, "recompute": Recompute, "level": Level, "linears": Linears}
_LEAST = {"tokens_per_rank": 1, "tolerance": 0, "nvshmem_buffer_gb": 0}


def check_arguments(
    *,
    tokens_per_rank: int,
    tolerance: float | None,
    nvshmem_buffer_gb: float,
    backward: str,
    recompute: str,
    level: str,
    linears: str,
) -> None:
    """Refuse values that mean nothing; transport and kernel are checked where they are chosen.

    Raises:
        SupportError: the first of them.
    """
    names = {"backward": backward, "recompute": recompute, "level": level, "linears": linears}
    for name, value in names.items():
        if value not in (served := get_args(_CHOICES[name])):
            raise SupportError(f"`{name}` is {value!r}; it can be {', '.join(served)}.")
    numbers = {"tokens_per_rank": tokens_per_rank, "tolerance": tolerance, "nvshmem_buffer_gb": nvshmem_buffer_gb}
    for name, number in numbers.items():
        kind, called = (Integral, "a whole number") if name == "tokens_per_rank" else (Real, "a number")
        if number is None and name == "tolerance":
            continue
        if not isinstance(number, kind) or isinstance(number, bool):
            raise SupportError(f"`{name}` is {number!r}; it must be {called}.")
        if not (math.isfinite(number) and number >= _LEAST[name]):
            raise SupportError(f"`{name}` is {number}; it must be at least {_LEAST[name]}.")


def check_offload(disaggregate: bool, recompute: str, backward: str, stages: int) -> None:
    """Refuse to keep in host memory what backward needs where it is not kept as rows of their own.

    Args:
        disaggregate, recompute, backward: of :class:`megatron_patches.api.CAD`.
        stages: of the pipeline.

    Raises:
        SupportError: so it is.
    """
    found = {"disaggregate": disaggregate, "recompute": recompute, "backward": backward}
    needed = {"disaggregate": True, "recompute": "all", "backward": "resend"}
    for name, value in needed.items():
        if found[name] != value:
            raise SupportError(
                f"offload is True, but {name} is {found[name]!r}: set it to {value!r}, or offload to False."
            )
    if stages > 1:
        raise SupportError(
            f"offload is True, but there are {stages} pipeline stages, with which it is not served: set offload to "
            "False, or do without stages."
        )


def check_keep_outputs(recompute: str, config: TransformerConfig) -> None:
    """Refuse to keep outputs of what is computed again anyway, or of which FP8 copies are kept.

    Args:
        recompute: of :class:`megatron_patches.api.CAD`.
        config: the model's.

    Raises:
        SupportError: so it is.
    """
    found = {"recompute": (recompute, "none"), "recompute_granularity": (config.recompute_granularity, None)}
    found["fp8"] = config.fp8, None
    for name, (value, needed) in found.items():
        if value != needed:
            raise SupportError(
                f"keep_outputs is True, but {name} is {value!r}: set it to {needed!r}, or keep_outputs to False."
            )


def check_level(level: str, disaggregate: bool, stages: int, ping_pong: bool) -> None:
    """Refuse to level time where no stage is ever idle, or where an idle one could only wait.

    Args:
        level, disaggregate, ping_pong: of :class:`megatron_patches.api.CAD`.
        stages: of the pipeline.

    Raises:
        SupportError: so it is.
    """
    if level != "time" or (disaggregate and stages > 1 and ping_pong):
        return
    why = "disaggregate is False" if not disaggregate else "ping_pong is False, so idle stages could only wait"
    if disaggregate and stages == 1:
        why = "there are no pipeline stages, and only stages are ever idle"
    raise SupportError(f"level is 'time', but {why}: set level to 'auto'.")


def check_gradients(gradients: torch.dtype, weights: torch.dtype) -> None:
    """Refuse types in which gradients are not added up.

    Raises:
        SupportError: so it is.
    """
    if gradients != torch.float32 and not gradients == weights == torch.bfloat16:
        raise SupportError(
            f"`gradients` is {gradients} and the weights are {weights}; gradients are added up in torch.float32, or, "
            "of torch.bfloat16 weights, in torch.bfloat16."
        )


def check_fp8_weights(config: TransformerConfig, distributed_optimizer: bool) -> None:
    """Refuse FP8 weights without the optimizer that has main weights for them.

    Raises:
        SupportError: so it is.
    """
    if config.fp8_param and not distributed_optimizer:
        raise SupportError(
            "fp8_param is True, but Megatron holds the main weights of FP8 weights in its distributed optimizer only: "
            "set distributed_optimizer to True, or leave fp8_param out."
        )
