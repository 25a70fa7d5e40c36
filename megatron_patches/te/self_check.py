"""Compares one of Transformer Engine's linear layers on this machine with float64, in bfloat16 and in FP8.

``CAD`` runs it before a model is built. Where products are wrong, a run in bfloat16 can take Megatron's own layers. A
run in FP8 is refused, as Megatron's own layers cannot compute in FP8.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from distca.cluster.agreement import first_objection
from distca.errors import SupportError
from distca.sizes.fp8_shapes import Fp8
from megatron_patches.te.quantization import fp8_of, in_fp8

logger = logging.getLogger(__name__)

_WIDTH, _OUT, _ROWS = 256, 384, 512
"""Inputs, outputs and rows of the layer that is checked."""
_MOST = {"none": 0.0078, "current": 0.10, "delayed": 0.10, "blockwise": 0.10}
"""The largest relative error of a product that passes, norm over norm, by scaling to FP8. In bfloat16 a product is
rounded once, which makes 0.2 %. Rounding to FP8 with 3 bits of fraction makes 2.6 %, and with the 2 bits of gradients
5.2 %. A product of two such tensors has 5.8 %."""
_MOST_FACTOR = 0.02
"""The largest distance from 1 that passes, of the factor by which a product differs from the exact one as a whole.
Errors of rounding cancel out in this factor, so it shows wrong scales."""


def check_products(config: TransformerConfig, device: torch.device) -> str | None:
    """Checks the output and both gradients of a linear layer; all ranks call it together.

    Args:
        config: the model's configuration, which says whether and how tensors are scaled to FP8.
        device: this rank's GPU.

    Returns:
        Why products in bfloat16 are wrong, as part of a sentence and the same on every rank; None if they are right.

    Raises:
        SupportError: the configuration has FP8, and products are wrong on some rank; all ranks raise it.
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
    """Returns why this rank's products are wrong, as part of a sentence; None if they are right."""
    try:
        actual, exact = _products(fp8, config, device)
    except Exception as error:  # Transformer Engine's libraries raise errors of any kind
        logger.debug("The self-check of products failed.", exc_info=True)
        return f"a linear layer fails: {(str(error).splitlines() or [''])[0] or type(error).__name__}"
    return objection(actual, exact, fp8)


def objection(actual: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], fp8: Fp8) -> str | None:
    """Returns why products are wrong, as part of a sentence; None if they are as right as their numbers allow.

    Args:
        actual: products by name.
        exact: the same products in float64.
        fp8: how tensors were scaled to FP8.
    """
    for name, expected in exact.items():
        values, square = actual[name].double(), expected.square().sum()
        off = float(((values - expected).square().sum() / square).sqrt())
        factor = float((values * expected).sum() / square)  # the least-squares factor from exact to actual values
        if not off <= _MOST[fp8]:
            return f"{name} is {off:.2%} off float64, and {_MOST[fp8]:.2%} is explained"
        if not abs(factor - 1) <= _MOST_FACTOR:
            return f"{name} is {factor:.3f} times what float64 gives"
    return None


def _products(
    fp8: Fp8, config: TransformerConfig, device: torch.device
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns a layer's output and gradients by name, as Transformer Engine and as float64 products give them."""
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
        init_method=torch.nn.init.zeros_,  # draws no random numbers, so the model's weights are as without the check
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
    """Returns Transformer Engine's recipe for the check; None for bfloat16.

    For delayed scaling it is that of current scaling: it runs the same products, and keeps no scales afterwards."""
    from transformer_engine.common import recipe

    if fp8 == "none":
        return None
    return recipe.Float8BlockScaling() if fp8 == "blockwise" else recipe.Float8CurrentScaling()
