"""Compares matrix products of a Transformer Engine linear layer with float64, on this rank's GPU."""

from __future__ import annotations

import logging
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from distca.cluster.agreement import first_objection
from distca.errors import SupportError
from distca.sizes.fp8_shapes import Fp8
from megatron_patches.te.quantization import fp8_of, in_fp8, name_fp8

logger = logging.getLogger(__name__)

_WIDTH, _OUT, _ROWS = 256, 384, 512
_MOST = {"none": 0.0078, "current": 0.10, "delayed": 0.10, "blockwise": 0.10}
"""The largest relative error that passes, for each way of scaling to FP8; "none" is bfloat16.

The error is the norm of the difference from float64, over the norm in float64. Rounding alone causes 0.2 % in bfloat16,
and up to 5.8 % in FP8.
"""
_MOST_FACTOR = 0.02
"""The most by which a factor f may differ from 1. With this f, f times the float64 product is closest to the tested
product, in the sum of squared differences. Rounding errors cancel in f, but a wrong scale changes f."""


def check_products(config: TransformerConfig, device: torch.device) -> str | None:
    """Checks a linear layer in bfloat16, and in FP8 if ``config`` has FP8. All ranks must call this together.

    Returns:
        Why products in bfloat16 are wrong, as part of a sentence and the same on every rank; None if they are right.

    Raises:
        SupportError: the configuration has FP8, and products in FP8 or bfloat16 are wrong on any rank.
    """
    fp8 = fp8_of(config)
    plain = first_objection(_why_wrong("none", config, device))
    scaled = None if plain or fp8 == "none" else first_objection(_why_wrong(fp8, config, device))
    torch.cuda.empty_cache()
    if fp8 != "none" and (plain or scaled):
        remedy = "leave `fp8` out and set `linears` to local" if plain else "leave `fp8` out"
        raise SupportError(
            f"{name_fp8(config)}, but Transformer Engine's products are wrong here, as {plain or scaled}: {remedy}, or "
            "install another version of Transformer Engine."
        )
    return plain


def _why_wrong(fp8: Fp8, config: TransformerConfig, device: torch.device) -> str | None:
    try:
        actual, exact = _products(fp8, config, device)
    except Exception as error:  # Transformer Engine's libraries raise errors of any kind
        logger.debug("The self-check of products failed.", exc_info=True)
        return f"a linear layer fails: {(str(error).splitlines() or [''])[0] or type(error).__name__}"
    return objection(actual, exact, fp8)


def objection(actual: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], fp8: Fp8) -> str | None:
    """Returns why ``actual`` is wrong, as part of a sentence; None if rounding explains its distance from ``exact``."""
    for name, expected in exact.items():
        values, square = actual[name].double(), expected.square().sum()
        off = float(((values - expected).square().sum() / square).sqrt())
        factor = float((values * expected).sum() / square)
        if not off <= _MOST[fp8]:
            return f"{name} is {off:.2%} off float64, and rounding explains at most {_MOST[fp8]:.2%}"
        if not abs(factor - 1) <= _MOST_FACTOR:
            return f"{name} is {factor:.3f} times what float64 gives"
    return None


def _products(
    fp8: Fp8, config: TransformerConfig, device: torch.device
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns a layer's output and gradients by name, from Transformer Engine and from float64."""
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
        init_method=torch.nn.init.zeros_,  # draws no random numbers, so the check does not change the model's weights
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

    For delayed scaling the check uses current scaling, which runs the same products and needs no earlier steps.
    """
    from transformer_engine.common import recipe

    if fp8 == "none":
        return None
    return recipe.Float8BlockScaling() if fp8 == "blockwise" else recipe.Float8CurrentScaling()
