"""A layer of Mamba-2 that is cut at its *core*, the convolution and the scan.

``distca.recurrent`` computes the core, and Megatron's mixer has the parameters and projections. The mixer's constructor
refuses to run without the packages mamba_ssm and einops, although nothing here calls them.

Shape suffixes: N rows (tokens), F columns of the projection, C channels of the convolution, H heads, V elements of an
output head.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn import functional

from distca.errors import SupportError
from distca.recurrent import CoreParameters, Recurrence, RecurrentKernel, choose_recurrent_kernel
from distca.recurrent.kernel import wide
from megatron_patches.layers.layer import Branch, SplitLayerParts
from megatron_patches.model.model_options import MEGATRONS, ModelOptions
from megatron_patches.model.recurrences import mamba_recurrence


class GroupedGatedNorm(torch.nn.Module):
    """RMSNorm of x · SiLU(gate) within each group of channels, computed in at least float32.

    Args:
        width: number of channels on this tensor-parallel rank.
        group_size: number of channels in a group.
        named: the weight's ``device`` and ``dtype``, and ``norm_before_gate``, which must be False.
    """

    def __init__(self, width: int, eps: float, group_size: int, **named: Any) -> None:
        super().__init__()
        assert not named["norm_before_gate"]
        self.weight = torch.nn.Parameter(torch.ones(width, device=named["device"], dtype=named["dtype"]))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Returns a tensor like ``x`` [rows, channels]; ``gate`` has the same shape."""
        dtype = wide(x.dtype)
        gated = (x.to(dtype) * functional.silu(gate.to(dtype))).unflatten(1, (-1, self.group_size))
        normed = gated * torch.rsqrt(gated.square().mean(2, keepdim=True) + self.eps)
        return (normed.flatten(1) * self.weight.to(dtype)).to(x.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"weight": self.weight}, prefix, {"weight": 0}, sharded_offsets
        )
        return found


class OwnMambaMixer(MambaMixer):
    """Megatron's mixer without mamba_ssm and einops. :class:`SplitMambaLayer` calls its projections and norm."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        with (
            patch.object(mamba_mixer, "HAVE_MAMBA_SSM", True),
            patch.object(mamba_mixer, "HAVE_EINOPS", True),
            patch.object(mamba_context_parallel, "HAVE_EINOPS", True),
            patch.object(mamba_mixer, "ExtendedRMSNorm", GroupedGatedNorm),
        ):
            super().__init__(*arguments, **named)

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise SupportError("A Mamba mixer was called by itself: run its layer in a model from distca.CAD.attach.")


class SplitMambaLayer(SplitLayerParts, MambaLayer):
    def __init__(
        self, config: TransformerConfig, *arguments: Any, options: ModelOptions = MEGATRONS, **named: Any
    ) -> None:
        super().__init__(config, *arguments, **named)
        self.options = options

    @property
    def input_layernorm(self) -> Any:  # type: ignore[override]
        return self.norm

    @cached_property
    def recurrence(self) -> Recurrence:
        return mamba_recurrence(self.config)

    @cached_property
    def core_kernel(self) -> RecurrentKernel:
        return choose_recurrent_kernel(self.recurrence, self.mixer.conv1d_weight.device, self.mixer.conv1d_weight.dtype)

    @property
    def core_parameters(self) -> CoreParameters:
        """The convolution's weights and biases, and D. The core adds D times the scan's input to its output."""
        return CoreParameters(self.mixer.conv1d_weight.squeeze(1), self.mixer.conv1d_bias, self.mixer.D)

    def pre(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Computes the norm and the projection of ``hidden``, [rows, 1, hidden].

        Returns:
            ``hidden`` and the gate for :meth:`mixed`, then the core's inputs mixed_NC, g_NH and beta_NH. mixed_NC is
            the scan's x, B and C before the convolution. A row multiplies the scan's state by exp(g_NH). beta_NH is the
            row's step size, Δ in the paper of Mamba.
        """
        mixer, what = self.mixer, self.recurrence
        hidden, projected_NF = self._projected(hidden, mixer.in_proj)
        gate, mixed_NC, steps_NH = projected_NF.split((what.heads * what.value_dim, what.channels, what.heads), dim=1)
        gate = gate.contiguous()  # A view would keep the whole projection until backward.
        dtype = wide(steps_NH.dtype)
        beta_NH = functional.softplus(steps_NH.to(dtype) + mixer.dt_bias.to(dtype))
        if self.options.step_min:
            beta_NH = beta_NH.clamp(min=self.options.step_min)
        g_NH = -mixer.A_log.to(dtype).exp() * beta_NH
        return hidden, gate, mixed_NC, g_NH, beta_NH

    def mixed(self, o: torch.Tensor, *residual: torch.Tensor) -> tuple[Branch, torch.Tensor]:
        """Applies the gated norm and the output projection to ``o``, the core's output o_NHV.

        Returns the mixer's output, and the hidden states to which the output is to be added."""
        hidden, gate = residual
        return self.mixer.out_proj(self.mixer.norm(o.flatten(1), gate).unsqueeze(1)), hidden

    def added(self, branch: Branch, residual: torch.Tensor) -> torch.Tensor:
        return self._add(branch, residual, self.mamba_bda, None)

    def forward(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        raise SupportError("A Mamba layer was called by itself: run it in a model from distca.CAD.attach.")
