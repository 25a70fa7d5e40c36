"""Whether Transformer Engine's linear layers compute on this machine what float64 does, in bfloat16 or FP8.

FP8 products have no plain version: where they are wrong, they are refused.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from distca.cluster.verdict import first_objection
from distca.errors import SupportError
from distca.sizes.fp8_shapes import Fp8
from megatron_patches.te.quantization import fp8_of, in_fp8

logger = logging.getLogger(__name__)

_WIDTH, _OUT, _ROWS = 256, 384, 512
_MOST = {"none": 0.0078, "current": 0.10, "delayed": 0.10, "blockwise": 0.10}
"""How far off a product may be, norm over norm, by how tensors are scaled to FP8. bfloat16 rounds once, 0.2 %. Numbers
of 3 bits behind the point are 2.6 % off, of 2 bits, as of gradients, 5.2 %: a product of both 5.8 %."""
_MOST_FACTOR = 0.02
"""How far from 1 a product's factor over the exact one may be: rounding cancels out in it."""


def check_products(config: TransformerConfig, device: torch.device) -> str | None:
    """Check forward and both gradients of a linear layer. Every rank calls it together.

    Args:
        config: the model's, which says how tensors are scaled.
        device: a GPU.

    Returns:
        What speaks against these layers in bfloat16, the same on every rank; None if nothing does.

    Raises:
        SupportError: on every rank, if products in FP8 are wrong on one.
    """
    fp8 = fp8_of(config)
    plain = first_objection(_why_wrong("none", config, device))
    scaled = None if plain or fp8 == "none" else first_objection(_why_wrong(fp8, config, device))
    torch.cuda.empty_cache()
    if fp8 != "none" and (plain or scaled):
        raise SupportError(
            f"`fp8` is {fp8}, but Transformer Engine's products are wrong here, as {plain or scaled}: set `fp8` to "
            "none, or install another version of it."
        )
    return plain


def _why_wrong(fp8: Fp8, config: TransformerConfig, device: torch.device) -> str | None:
    try:
        actual, exact = _products(fp8, config, device)
    except Exception as error:  # of its libraries, which raise anything
        logger.debug("The self-check of products failed.", exc_info=True)
        return f"a linear layer fails: {(str(error).splitlines() or [''])[0] or type(error).__name__}"
    return objection(actual, exact, fp8)


def objection(actual: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], fp8: Fp8) -> str | None:
    """Returns an objection to products, as part of a sentence; None if they are as right as their numbers allow.

    Args:
        actual: by name.
        exact: the same in float64.
        fp8: how tensors are scaled.
    """
    for name, expected in exact.items():
        values, square = actual[name].double(), expected.square().sum()
        off = float(((values - expected).square().sum() / square).sqrt())
        factor = float((values * expected).sum() / square)
        if not off <= _MOST[fp8]:
            return f"{name} is {off:.2%} off float64, and {_MOST[fp8]:.2%} is explained"
        if not abs(factor - 1) <= _MOST_FACTOR:
            return f"{name} is {factor:.3f} times what float64 gives"
    return None


def _products(
    fp8: Fp8, config: TransformerConfig, device: torch.device
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Output and gradients of one of Transformer Engine's layers, and of float64."""
    import transformer_engine.pytorch as te

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    x, gradient, weight = draw(_ROWS, _WIDTH).requires_grad_(), draw(_ROWS, _OUT), draw(_OUT, _WIDTH)
    linear = te.Linear(
        _WIDTH,
        _OUT,
        bias=False,
        params_dtype=torch.bfloat16,
        device=device,
        fuse_wgrad_accumulation=True,
        init_method=torch.nn.init.zeros_,  # or the model's weights would be others than without the check
    )
    with torch.no_grad():
        linear.weight.copy_(weight)
    linear.weight.main_grad = torch.zeros(_OUT, _WIDTH, device=device)
    with in_fp8(_recipe(fp8), config):
        y = linear(x)
    y.backward(gradient)
    assert x.grad is not None
    names = ("the output", "the input's gradient", "the weight's gradient")
    actual = dict(zip(names, (y.detach(), x.grad, linear.weight.main_grad), strict=True))
    wide_x, wide_gradient, wide_weight = (each.detach().double() for each in (x, gradient, weight))
    products = (wide_x @ wide_weight.t(), wide_gradient @ wide_weight, wide_gradient.t() @ wide_x)
    return actual, dict(zip(names, products, strict=True))


def _recipe(fp8: Fp8) -> Any:
    """Delayed scaling runs the same products with scales that it keeps for the layer's lifetime; in their place are
    those of the current tensor, which leave nothing behind."""
    from transformer_engine.common import recipe

    if fp8 == "none":
        return None
    return recipe.Float8BlockScaling() if fp8 == "blockwise" else recipe.Float8CurrentScaling()
