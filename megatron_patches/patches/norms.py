"""Defines the norms with which this project's specs build Megatron's layers.

Unlike Megatron's norms from torch (WrappedTorchNorm), these norms support sequence parallelism and zero-centred
weights. A zero-centred weight is the factor minus one.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig

from distca.ops.cross_entropy import wide
from distca.ops.rms_norm import add_rms_norm, fill_rms_norm, rms_norm
from distca.ops.rotary import HeadNorms
from distca.ops.triton import has_kernels
from megatron_patches.model.added_to_forward import added_to_forward


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm over the last dimension, computed in float32 on GPUs.

    With ``layernorm_zero_centered_gamma`` the factor is 1 + weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.zero_centered = _centred(self, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x`` [..., hidden] normalised, in the type of ``x``."""
        assert self.eps is not None
        return rms_norm(x, _factors(self.weight, self.zero_centered), self.eps)

    def beside(self, x: torch.Tensor, branch: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns x + branch, and the sum normalised. If ``branch`` is None, the sum is ``x``."""
        assert self.eps is not None
        if has_kernels(x, "RMSNorm") and not added_to_forward(self):
            return add_rms_norm(x, branch, _factors(self.weight, self.zero_centered), self.eps)
        total = x if branch is None else x + branch
        return total, self(total)

    def fill(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``x`` normalised into ``out``, without autograd."""
        assert self.eps is not None
        fill_rms_norm(x, _factors(self.weight, self.zero_centered), self.eps, out)


class PlainRMSNorm(RMSNorm):
    """RMSNorm whose factor is the weight itself, even with ``layernorm_zero_centered_gamma``."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **named: Any) -> None:
        super().__init__(config, hidden_size, eps, **named)
        self.zero_centered = False
        torch.nn.init.ones_(self.weight)


def head_norms(query: Any, key: Any) -> HeadNorms | None:
    """Returns the norms of queries and keys for ``split_and_rotate``; None if that function cannot compute them."""
    if not (isinstance(query, RMSNorm) and isinstance(key, RMSNorm)) or query.eps is None or query.eps != key.eps:
        return None
    if added_to_forward(query) or added_to_forward(key):
        return None
    of_query, of_key = (_factors(each.weight, each.zero_centered) for each in (query, key))
    return HeadNorms(of_query, of_key, query.eps)


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm over the last dimension (Ba et al. 2016): (x - mean) / √(variance + epsilon) × weight + bias.

    With ``layernorm_zero_centered_gamma`` the formula has 1 + weight in place of the weight.
    """

    has_bias = True

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, bias=self.has_bias)
        self.zero_centered = _centred(self, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x`` [..., hidden] normalised, in the type of ``x``."""
        if not self.zero_centered:
            return super().forward(x)
        factors = _factors(self.weight, self.zero_centered)
        bias = None if self.bias is None else self.bias.to(factors.dtype)
        return torch.nn.functional.layer_norm(x.to(factors.dtype), x.shape[-1:], factors, bias, self.eps).to(x.dtype)

    def fill(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``x`` normalised into ``out``. The caller must disable autograd."""
        out.copy_(self.forward(x))


class LayerNormWithoutBias(LayerNorm):
    has_bias = False


def norm_class(config: TransformerConfig, bias: bool = True) -> type[RMSNorm] | type[LayerNorm]:
    """Returns the class of a configuration's norms. ``bias``: whether LayerNorms have a bias."""
    if config.normalization == "RMSNorm":
        return RMSNorm
    return LayerNorm if bias else LayerNormWithoutBias


class _WidthNorm(torch.nn.Module):
    """RMSNorm of a token's queries or keys, over the heads of all tensor-parallel ranks together.

    Every rank stores the whole weight. ``hidden_size`` is the size of one head.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(self.heads(config) * hidden_size, dtype=config.params_dtype))
        self.eps, self.zero_centered = eps, _centred(self, config)

    @staticmethod
    def heads(config: TransformerConfig) -> int:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x`` [tokens, ...] of this rank's heads normalised, in the shape and type of ``x``."""
        flat = x.flatten(1).to(wide(x.dtype))
        # Every rank's output depends on the sum over ranks, so the gradients of all ranks must be added up. In backward
        # copy_to_tensor_model_parallel_region adds them up; in forward it changes nothing.
        squares = copy_to_tensor_model_parallel_region(flat.square().sum(1, keepdim=True))
        mean = reduce_from_tensor_model_parallel_region(squares) / len(self.weight)
        first = parallel_state.get_tensor_model_parallel_rank() * flat.shape[1]
        factors = _factors(self.weight, self.zero_centered)[first : first + flat.shape[1]]
        return (flat * torch.rsqrt(mean + self.eps) * factors).to(x.dtype).view_as(x)


class QueryWidthNorm(_WidthNorm):
    @staticmethod
    def heads(config: TransformerConfig) -> int:
        heads: int = config.num_attention_heads
        return heads


class KeyWidthNorm(_WidthNorm):
    @staticmethod
    def heads(config: TransformerConfig) -> int:
        assert config.num_query_groups is not None
        return config.num_query_groups


def _centred(norm: torch.nn.RMSNorm | torch.nn.LayerNorm | _WidthNorm, config: TransformerConfig) -> bool:
    """Prepares a norm's parameters; returns whether the weight is zero-centred."""
    # With sequence parallelism each tensor-parallel rank normalises its own rows. Megatron adds up a parameter's
    # gradients over these ranks if its attribute ``sequence_parallel`` is True, or if it is in a q_layernorm or
    # k_layernorm.
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    if config.layernorm_zero_centered_gamma:
        torch.nn.init.zeros_(norm.weight)
    return bool(config.layernorm_zero_centered_gamma)


def _factors(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.to(wide(weight.dtype)) + 1 if zero_centered else weight
