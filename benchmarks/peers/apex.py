"""Apex's product that adds up weight gradients, where Apex is not installed.

Megatron-Core's output layer calls that CUDA extension, which NVIDIA's containers have, and refuses
``gradient_accumulation_fusion`` without it, for Transformer Engine's layers too. Torch's own product does the same.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

NAME = "fused_weight_gradient_mlp_cuda"


def stand_in() -> None:
    """Put torch's product in Apex's place; to be called before Megatron-Core is imported."""
    if NAME not in sys.modules and find_spec(NAME) is None:
        module: Any = ModuleType(NAME)
        module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = _add_product
        sys.modules[NAME] = module


def _add_product(rows: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
    """total += gradientᵀ rows, without rounding the product before it is added where torch has such a product."""
    from distca.ops.output_loss import add_product

    add_product(total, gradient.t(), rows)
