"""Seconds of a layer's matrix products in FP8: Transformer Engine's linear layers, with all that quantises for them.

No product in FP8 can be had without that, so what counts is the time of whole linear layers over their time in
bfloat16. It imports Transformer Engine when it is called, which only GPUs can do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from distca.device.clock import Clock
from distca.plan import AttentionShape
from distca.profile.linear import sizes_of
from distca.profile.timing import median_seconds
from distca.sizes.fp8_shapes import unfit_widths

_ROWS = 65_536
"""Rows of a product. On fewer, narrow ones take less time than the host needs to queue them."""
_WARM_UP, _REPEATS = 10, 10


def linear_work(width: int, out: int, rows: int, device: torch.device, scaling: str) -> Callable[[], None]:
    """Forward and backward of one linear layer on ``rows`` rows, to be timed; its weight is quantised once, as in a
    step of many micro-batches.

    Args:
        width: of its input.
        out: of its output.
        rows: of both.
        device: a GPU.
        scaling: "current", "delayed" or "blockwise"; "none" for bfloat16.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    recipes = {
        "current": recipe.Float8CurrentScaling,
        # Its largest values stay here: ranks may run it another number of times.
        "delayed": lambda: recipe.DelayedScaling(reduce_amax=False),
        "blockwise": recipe.Float8BlockScaling,
    }
    chosen = None if scaling == "none" else recipes[scaling]()
    linear = te.Linear(width, out, bias=False, params_dtype=torch.bfloat16, device=device, fuse_wgrad_accumulation=True)
    linear.weight.main_grad = torch.zeros(out, width, device=device)
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(rows, out, device=device, dtype=torch.bfloat16)
    first = True

    def work() -> None:
        nonlocal first
        context: AbstractContextManager[None] = (
            nullcontext() if chosen is None else te.autocast(enabled=True, recipe=chosen)
        )
        with context:
            y = linear(x, is_first_microbatch=first)
        first = False
        y.backward(gradient)
        x.grad = None

    return work


def measure_fp8(
    shape: AttentionShape, hidden: int, ffn: int, *, device: torch.device, scalings: Sequence[str]
) -> dict[str, float]:
    """Time of a layer's four linear layers in FP8 over that in bfloat16, forward and backward together, for each of
    ``scalings``; none where FP8 cannot take a width."""
    heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
    widths = {"hidden": hidden, "ffn": ffn, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    if any(unfit_widths("current", **widths, tp=1, shared=False)):
        return {}
    sizes, clock = sizes_of(shape, hidden, ffn), Clock(device)

    def seconds(scaling: str) -> float:
        total = 0.0
        for width, out in sizes:
            work = linear_work(width, out, _ROWS, device, scaling)
            for _ in range(_WARM_UP):
                work()
            total += median_seconds(work, clock, _REPEATS)
        return total

    unscaled = seconds("none") if scalings else 0.0
    return {scaling: seconds(scaling) / unscaled for scaling in scalings}
