"""Chooses Megatron's own or Transformer Engine's linear layers for a model.

Only Transformer Engine's layers compute in FP8, so FP8 is refused where these layers cannot be used. bfloat16 moments
of Adam are refused where Transformer Engine's Adam cannot be used.

A tensor is scaled before it is rounded to FP8. Three names say which values give the scale (:func:`fp8_of`): the
tensor's own ("current"), those of earlier steps ("delayed"), or each block's own ("blockwise").
"""

from __future__ import annotations

from typing import Literal, NoReturn

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from distca.cluster.agreement import first_objection
from distca.errors import SupportError
from distca.sizes.fp8_shapes import unfit_widths
from megatron_patches.model.latent import is_latent
from megatron_patches.te.installed import why_not_supported
from megatron_patches.te.quantization import fp8_of, name_fp8

Linears = Literal["auto", "local", "te"]

_NO_GPU = "Transformer Engine computes on GPUs only, and torch has none here"
_OWN = "with experts or latent attention all linear layers are Megatron-Core's own"
_CAPABILITY = (8, 9)
"""The lowest CUDA compute capability that has FP8 products."""
_BLOCKWISE_CAPABILITY, _BLOCKWISE_CUDA = (9, 0), (12, 9)
"""The lowest compute capability and CUDA version for FP8 with scaling "blockwise"."""


def use_te(linears: Linears, config: TransformerConfig, device: torch.device) -> bool:
    """Returns True if a model gets Transformer Engine's linear layers, and False if it gets Megatron's own ("local").

    All ranks call this together, with the same ``linears`` and ``config``, and get the same answer. "auto" gives True
    if all ranks can use these layers, and the model has neither experts nor latent attention.

    Raises:
        SupportError: ``linears`` is "te" or the model has FP8, but Transformer Engine's layers cannot be used; or FP8
            is not supported on a rank's GPU or for this configuration.
    """
    fp8 = fp8_of(config)
    if config.num_moe_experts or is_latent(config):
        if linears == "te":
            raise SupportError(f"`linears` is te, but {_OWN}: set `linears` to auto or local.")
        linears = "local"
    if linears == "local":
        if fp8 != "none":
            raise SupportError(
                f"{name_fp8(config)}, but `linears` is local, and Megatron-Core's own linear layers know no FP8: set "
                "`linears` to auto or te, or leave `fp8` out."
            )
        return False
    reason = first_objection(why_not_te(device, config.params_dtype))
    if reason and (linears == "te" or fp8 != "none"):
        if fp8 == "none":
            raise SupportError(f"`linears` is te, but {reason}: set `linears` to auto.")
        raise SupportError(f"{name_fp8(config)}, but {reason}: leave `fp8` out.")
    if fp8 != "none":
        _check_fp8(config, device)
    return reason is None


def refuse_te_spec(config: TransformerConfig, device: torch.device) -> NoReturn:
    """Raises SupportError, which says why a layer spec cannot have Transformer Engine's linear layers."""
    reason = why_not_te(device, config.params_dtype) or "`linears` is local, or another rank cannot use them"
    if config.num_moe_experts or is_latent(config):
        reason = _OWN
    raise SupportError(
        f"the layer spec has Transformer Engine's linear layers, but {reason}: give the spec of megatron's "
        "get_gpt_layer_local_spec(normalization='RMSNorm')."
    )


def check_moments(moments: torch.dtype, device: torch.device) -> None:
    """Raises SupportError if Adam's ``moments`` are not float32 and Transformer Engine's Adam cannot be used."""
    if moments == torch.float32:
        return
    if reason := _NO_GPU if device.type != "cuda" else why_not_supported():
        raise SupportError(
            f"`moments` is {str(moments).removeprefix('torch.')}, which needs Transformer Engine's Adam, but {reason}: "
            "set `moments` to float32."
        )


def why_not_te(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why Transformer Engine's linear layers cannot be used, as part of a sentence; None if they can."""
    if device.type != "cuda":
        return _NO_GPU
    if dtype != torch.bfloat16:
        return f"Transformer Engine's linear layers are supported in bfloat16 only, and parameters are {dtype}"
    return why_not_supported()


def why_not_fp8(device: torch.device, blockwise: bool) -> str | None:
    """Returns why this GPU cannot compute in FP8, as part of a sentence; None if the GPU can."""
    capability, least = torch.cuda.get_device_capability(device), _BLOCKWISE_CAPABILITY if blockwise else _CAPABILITY
    if capability < least:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, and "
            f"{least[0]}.{least[1]} is needed"
        )
    cuda = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    if blockwise and cuda < _BLOCKWISE_CUDA:
        return f"torch is built for CUDA {torch.version.cuda}, and 12.9 is needed"
    return None


def _check_fp8(config: TransformerConfig, device: torch.device) -> None:
    fp8 = fp8_of(config)
    if reason := first_objection(why_not_fp8(device, fp8 == "blockwise")):
        raise SupportError(f"{name_fp8(config)}, but {reason}: leave `fp8` out.")
    if config.fp8_param and config.use_cpu_initialization:
        raise SupportError(
            "fp8_param is True, but use_cpu_initialization draws weights after Transformer Engine has kept unrounded "
            "copies for the optimizer, and the copies have earlier values: set use_cpu_initialization to False."
        )
    if config.fp8_param and config.tp_only_amax_red and fp8 == "delayed":
        raise SupportError(
            "tp_only_amax_red is True, so data-parallel ranks have different scales, but with fp8_param every rank "
            "casts a part of each weight, and a weight has one scale: set tp_only_amax_red to False."
        )
    assert config.ffn_hidden_size is not None and config.num_query_groups is not None
    assert config.kv_channels is not None
    tp = parallel_state.get_tensor_model_parallel_world_size()
    for unfit in unfit_widths(
        fp8,
        hidden=config.hidden_size,
        ffn=config.ffn_hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        tp=tp,
        shared=config.sequence_parallel,
    ):
        said = unfit.replace(f"`fp8` is {fp8}", name_fp8(config)).replace("`fp8` to none", "fp8 to None")
        raise SupportError(said.replace("`tp`", "tensor_model_parallel_size"))
