"""Rows picked out of a tensor and put back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from distca.device.host_to_device import Destination, to_device
from distca.plan.sorting import expand


@dataclass(frozen=True)
class Picked:
    """Rows of a tensor, no row twice. Without an index they are a range, which is viewed and not copied."""

    begin: int
    rows: int
    index: torch.Tensor | None

    @staticmethod
    def of(begin: np.ndarray, count: np.ndarray, device: Destination) -> Picked:
        """The rows of these ranges."""
        rows = expand(begin, count)
        if len(rows) and (np.diff(rows) == 1).all():
            return Picked(int(rows[0]), len(rows), None)
        return Picked(0, len(rows), to_device(rows, device))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of ``x``."""
        return x[self.begin : self.begin + self.rows] if self.index is None else x.index_select(0, self.index)

    def put(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrite these rows of ``x``."""
        if self.index is None:
            x[self.begin : self.begin + self.rows] = rows
        else:
            x.index_copy_(0, self.index, rows.to(x.dtype))

    def add(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Add to these rows of ``x``; no row repeats, so the sum has one order."""
        if self.index is None:
            x[self.begin : self.begin + self.rows] += rows
        else:
            x.index_add_(0, self.index, rows.to(x.dtype))
