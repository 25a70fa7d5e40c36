"""Recurrences of tiny shapes, and random rows for them in float64."""

from __future__ import annotations

import torch

from distca.recurrent import CoreParameters, Recurrence

RECURRENCES = {
    "gated delta net": Recurrence.gated_delta_net(1, 2, 4, 3),
    "mamba-2": Recurrence.mamba2(1, 2, 3, 4),
}


def leaves_of(what: Recurrence, rows: int, seed: int) -> list[torch.Tensor]:
    """Rows before the convolution, g and β, then the convolution's kernel and bias and the skip: all require
    gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    leaves = [
        normal(rows, what.channels),
        -torch.nn.functional.softplus(normal(rows, what.heads) - 1),
        normal(rows, what.heads).sigmoid(),
        normal(what.channels, what.kernel) / 2,
        normal(what.channels) / 4,
        normal(what.heads),
    ]
    return [each.requires_grad_() for each in leaves]


def parameters_of(leaves: list[torch.Tensor]) -> CoreParameters:
    return CoreParameters(*leaves[3:])
