"""Products of a tensor and a factor that is on the device too."""

from __future__ import annotations

import torch


def scaled(x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns ``x`` times ``factor``, one element in at least float32, in the dtype of ``x``; only products are rounded.

    In ``x * factor`` on a GPU, torch would first round a factor without dimensions to a narrower dtype of ``x``. The
    result is ``out``, which may be ``x``; without it new memory.
    """
    out = torch.empty_like(x) if out is None else out
    return torch.mul(x, factor.reshape(1).expand(x.shape), out=out)
