"""Megatron-Core in float64, although parts of it cast to float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def float32_casts_lifted() -> Iterator[None]:
    """Let float64 tensors stay what they are where Megatron casts to float32, also when it computes again."""
    float_, to = torch.Tensor.float, torch.Tensor.to

    def lifted_float(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if self.dtype == torch.float64 else float_(self, *args, **kwargs)

    def lifted_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        casts = torch.float32 in (*args, *kwargs.values())
        return self if casts and self.dtype == torch.float64 else to(self, *args, **kwargs)

    with patch.object(torch.Tensor, "float", lifted_float), patch.object(torch.Tensor, "to", lifted_to):
        yield
