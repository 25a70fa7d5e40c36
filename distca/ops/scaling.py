"""Products of a tensor and a factor that is on the device too."""

from __future__ import annotations

import torch


def scaled(x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns ``x`` times ``factor`` in the dtype of ``x``. Only the products are rounded to that dtype.

    In ``x * factor`` on a GPU, torch would first round a factor without dimensions to the dtype of ``x``.

    Args:
        x: of any shape.
        factor: one element, in at least float32.
        out: where the products go, perhaps ``x`` itself; None for new memory.
    """
    out = torch.empty_like(x) if out is None else out
    return torch.mul(x, factor.reshape(()).expand(x.shape), out=out)
