"""Weight gradients that the matrix product itself adds up in float32, without rounding in between.

megatron's linear layers ask for it by ``gradient_accumulation_fusion`` and call a CUDA extension of Apex, which few
have installed. torch's own product with a float32 result does the same.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import layers

from distca.ops.output_loss import add_product


class _Products:
    """Stands in for the extension's module."""

    @staticmethod
    def wgrad_gemm_accum_fp32(rows: torch.Tensor, d_out: torch.Tensor, main_grad: torch.Tensor) -> None:
        """main_grad += d_outᵀ @ rows. rows: [N, in], d_out: [N, out], main_grad: [out, in] float32."""
        add_product(main_grad, d_out.t(), rows)


def accumulate_weight_gradients_in_products() -> None:
    """Let ``gradient_accumulation_fusion`` work without Apex; to be called before the model is built."""
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = _Products
        layers._grad_accum_fusion_available = True
