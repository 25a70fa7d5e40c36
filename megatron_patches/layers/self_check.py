"""Compares GPU operations with float64 on small inputs.

The operations are this project's fused ones, such as RMSNorm, and the matrix products of Transformer Engine.
"""

from __future__ import annotations

from functools import cache

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from distca.errors import SupportError
from distca.ops.gate import SWIGLU
from distca.ops.self_check import Widths, check_operations
from megatron_patches.model.latent import is_latent, latent_of
from megatron_patches.patches.fused_ops import gate_of
from megatron_patches.steps.cost_models import attention_shape

_products_checked: set[str] = set()
"""The FP8 formats and recipes for which Transformer Engine's products were right in this process."""
_check_operations = cache(check_operations)


def check_layers(config: TransformerConfig, device: torch.device, te: bool) -> None:
    """Compares fused operations with float64, and Transformer Engine's products too if ``te`` is True.

    A wrong fused operation is replaced by torch's own, with a warning. All ranks must call this function together.
    Without a GPU this function does nothing.

    Raises:
        SupportError: on all ranks, if Transformer Engine's products are wrong on any rank.
    """
    if device.type != "cuda":
        return
    shape, tp = attention_shape(config), parallel_state.get_tensor_model_parallel_world_size()
    assert config.ffn_hidden_size is not None
    latent: tuple[int, ...] = ()
    if is_latent(config):
        of = latent_of(config)
        latent = tuple(filter(None, (of.q_rank, of.kv_rank)))
    heads, gate = (shape.heads, shape.kv_heads, shape.head_dim), gate_of(config) or SWIGLU
    experts = bool(config.num_moe_experts)
    biases = experts and config.add_bias_linear
    sizes = config.hidden_size, config.ffn_hidden_size // tp, *heads
    widths = Widths(*sizes, latent, gate, experts, biases, head_norms=config.qk_layernorm and not latent)
    _check_operations(widths, config.params_dtype, device)
    kind = f"{config.fp8} {config.fp8_recipe}"
    if te and kind not in _products_checked:
        from megatron_patches.te.self_check import check_products

        if wrong := check_products(config, device):
            raise SupportError(
                f"Transformer Engine's linear layers are wrong here, as {wrong}: set `linears` to local, or install "
                "another version of Transformer Engine."
            )
        _products_checked.add(kind)
