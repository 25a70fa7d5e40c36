"""The changes to logits before the softmax: a factor, and a soft limit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distca.ops.cross_entropy import wide


@dataclass(frozen=True)
class LogitTransform:
    """Logits l become m l, and with a limit c they become c tanh(m l / c).

    Attributes:
        multiplier: m.
        softcap: c; 0 for none.
    """

    multiplier: float = 1.0
    softcap: float = 0.0

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """New logits of the same type, differentiable."""
        if self.softcap:
            bounded = torch.tanh(logits.to(wide(logits.dtype)) * (self.multiplier / self.softcap))
            return (bounded * self.softcap).to(logits.dtype)
        return logits if self.multiplier == 1.0 else logits * self.multiplier

    def apply_(self, logits: torch.Tensor, gradient: bool) -> torch.Tensor | float:
        """Overwrite ``logits`` with the new ones, by torch; limits are computed in at least float32.

        Returns:
            What gradients of the new logits are multiplied by to become those of the old ones: one number, or with a
            limit and where ``gradient`` asks for it a tensor like ``logits``.
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
