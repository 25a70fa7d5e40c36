"""A tiny layer with a recurrent core without megatron, and the same computation on whole documents by autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from distca.recurrent import CoreParameters, Recurrence, RecurrentKernel, choose_recurrent_kernel
from distca.testing.reference_recurrence import recurrent_core


@dataclass
class ToyRecurrentLayer:
    """hidden → rows of the core and an output gate by a matrix; hidden + (o · SiLU(gate)) · matrix. Weights are leaves
    of the autograd graph.

    Attributes:
        recurrence: of the core.
        into: [width, channels + 2 · heads + heads · value_dim].
        out: [heads · value_dim, width].
        core_parameters: of the core.
    """

    recurrence: Recurrence
    into: torch.Tensor
    out: torch.Tensor
    core_parameters: CoreParameters

    @property
    def core_kernel(self) -> RecurrentKernel:
        return choose_recurrent_kernel(self.recurrence, self.into.device, self.into.dtype)

    @property
    def weights(self) -> list[torch.Tensor]:
        """All of them."""
        core = self.core_parameters
        return [each for each in (self.into, self.out, core.kernel, core.bias, core.skip) if each is not None]

    def pre(self, hidden: torch.Tensor, nano: int) -> tuple[torch.Tensor, ...]:
        what = self.recurrence
        widths = what.channels, what.heads, what.heads, what.heads * what.value_dim
        mixed, decay, beta, gate = (torch.tanh(hidden) @ self.into).split(widths, dim=1)
        return hidden, gate, mixed, -functional.softplus(decay), beta.sigmoid()

    def post(self, o_NHV: torch.Tensor, *residual: torch.Tensor, nano: int) -> torch.Tensor:
        hidden, gate = residual
        return hidden + (o_NHV.flatten(1) * functional.silu(gate)) @ self.out

    def whole(self, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """The layer on whole packed documents."""
        hidden, gate, *rows = self.pre(hidden, 0)
        o = recurrent_core(rows[0], rows[1], rows[2], self.core_parameters, lengths, self.recurrence)
        return self.post(o, hidden, gate, nano=0)


def toy_recurrent_layers(
    recurrences: Sequence[Recurrence], width: int, seed: int, dtype: torch.dtype = torch.float64
) -> list[ToyRecurrentLayer]:
    """Layers with seeded weights that require gradients; those without the delta rule have a bias and a skip."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5
        return drawn.to(dtype).requires_grad_()

    layers = []
    for what in recurrences:
        out = weight(what.heads * what.value_dim, width)
        into = weight(width, what.channels + 2 * what.heads + len(out))
        kernel = (weight(what.kernel, what.channels).detach().t().contiguous()).requires_grad_()
        more = (None, None) if what.delta else (weight(what.channels), weight(what.heads))
        layers.append(ToyRecurrentLayer(what, into, out, CoreParameters(kernel, *more)))
    return layers
