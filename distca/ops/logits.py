"""Changes to the output layer's logits before the softmax: a factor and a soft limit, which some models have."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distca.ops.cross_entropy import wide


@dataclass(frozen=True)
class LogitTransform:
    """Logits l become m · l, or with a limit c they become c · tanh(m · l / c).

    Attributes:
        multiplier: m.
        softcap: c; 0 for none.
    """

    multiplier: float = 1.0
    softcap: float = 0.0

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the changed logits in the same dtype, differentiable."""
        if self.softcap:
            bounded = torch.tanh(logits.to(wide(logits.dtype)) * (self.multiplier / self.softcap))
            return (bounded * self.softcap).to(logits.dtype)
        return logits if self.multiplier == 1.0 else logits * self.multiplier

    def apply_(self, logits: torch.Tensor, gradient: bool) -> torch.Tensor | float:
        """Overwrites ``logits`` with the changed ones, without autograd; limits are computed in at least float32.

        Returns:
            The derivative of the changed logits by the given ones. It is a number, or with a limit and ``gradient`` a
            tensor like ``logits``.
        """
        if not self.softcap:
            if self.multiplier != 1.0:
                logits *= self.multiplier
            return self.multiplier
        bounded = torch.tanh(logits.to(wide(logits.dtype)) * (self.multiplier / self.softcap))
        logits.copy_(bounded * self.softcap)
        if not gradient:
            return self.multiplier
        return (bounded.square_().sub_(1).mul_(-self.multiplier)).to(logits.dtype)


AS_THEY_ARE = LogitTransform()
"""No change."""
