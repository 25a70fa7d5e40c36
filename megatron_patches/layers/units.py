"""The units of a stack. A unit is a mixer (attention or a recurrent core) with the MLPs or experts up to the next
mixer.

A layer of a GPTModel is a unit. In a HybridModel mixers and MLPs are layers of their own, and the same code runs them.
One operation adds a mixer's output to the residual and computes the norm before the next MLP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp

from distca.recurrent import CoreParameters, Recurrence, RecurrentKernel
from megatron_patches.experts.balance import Half, MicroBatchBalance
from megatron_patches.experts.layer import Parts
from megatron_patches.layers.layer import SplitTransformerLayer
from megatron_patches.layers.rotations import RowRotations


@dataclass
class Unit:
    """The layers of a unit.

    Attributes:
        mixer: a layer with attention or a recurrent core.
        before: layers with MLPs alone that come before the mixer, if it is the first of a stage.
        behind: layers with the MLPs behind the mixer; in a GPTModel this is the mixer's layer itself.
    """

    mixer: Any
    before: Sequence[SplitTransformerLayer]
    behind: list[SplitTransformerLayer]


def units_in(layers: Iterable[Any]) -> list[Unit]:
    """Returns the units of a stage's layers."""
    units: list[Unit] = []
    before: list[SplitTransformerLayer] = []
    for layer in layers:
        if not isinstance(getattr(layer, "self_attention", None), IdentityOp):
            units.append(Unit(layer, before, []))
            before = []
        if not isinstance(getattr(layer, "mlp", IdentityOp()), IdentityOp):
            (units[-1].behind if units else before).append(layer)
    return units


@dataclass(frozen=True)
class _Bound:
    """A unit for one micro-batch.

    Attributes:
        unit: the unit's layers.
        rotations: rotations of each nano-batch; empty where no layer has attention.
        balance: what the micro-batch's routers count, in models with experts.
    """

    unit: Unit
    rotations: Sequence[RowRotations]
    balance: MicroBatchBalance | None

    def post(self, o: torch.Tensor, *residual: torch.Tensor, nano: int) -> torch.Tensor:
        """Returns the output of the unit's last layer."""
        last, half = self.unit.mixer, self._half(nano)
        branch, hidden = last.mixed(o, *residual)
        for last in self.unit.behind:
            branch, hidden = last.behind(branch, hidden, half)
        output: torch.Tensor = last.added(branch, hidden)
        return output

    @property
    def has_exchanges(self) -> bool:
        """Whether rows travel to experts within :meth:`post`."""
        return any(layer.has_exchanges for layer in self.unit.behind)

    def post_parts(self, o: torch.Tensor, *residual: torch.Tensor, nano: int) -> Parts:
        """Computes what :meth:`post` does, as a generator: it pauses while rows are on their way to experts, and
        back."""
        last, half = self.unit.mixer, self._half(nano)
        branch, hidden = last.mixed(o, *residual)
        for last in self.unit.behind:
            branch, hidden = yield from last.behind_parts(branch, hidden, half)
        output: torch.Tensor = last.added(branch, hidden)
        return output

    def _first(self, hidden: torch.Tensor, nano: int) -> torch.Tensor:
        """Returns ``hidden`` after the layers before the mixer."""
        for layer in self.unit.before:
            hidden = layer.added(*layer.behind(None, hidden, self._half(nano)))
        return hidden

    def _half(self, nano: int) -> Half | None:
        return None if self.balance is None else self.balance.half(nano)


@dataclass(frozen=True)
class BoundUnit(_Bound):
    """A unit with attention."""

    @property
    def sink(self) -> torch.Tensor | None:
        sink: torch.Tensor | None = self.unit.mixer.self_attention.core_attention.softmax_offset
        return sink

    def pre(self, hidden: torch.Tensor, nano: int) -> tuple[torch.Tensor, ...]:
        mixer = self.unit.mixer
        made: tuple[torch.Tensor, ...] = mixer.pre(
            self._first(hidden, nano), self.rotations[nano].of(mixer.layer_number)
        )
        return made


@dataclass(frozen=True)
class BoundRecurrentUnit(_Bound):
    """A unit with a recurrent core, which has no rotations."""

    @property
    def recurrence(self) -> Recurrence:
        what: Recurrence = self.unit.mixer.recurrence
        return what

    @property
    def core_kernel(self) -> RecurrentKernel:
        kernel: RecurrentKernel = self.unit.mixer.core_kernel
        return kernel

    @property
    def core_parameters(self) -> CoreParameters:
        parameters: CoreParameters = self.unit.mixer.core_parameters
        return parameters

    def pre(self, hidden: torch.Tensor, nano: int) -> tuple[torch.Tensor, ...]:
        made: tuple[torch.Tensor, ...] = self.unit.mixer.pre(self._first(hidden, nano))
        return made


def bound_units(
    layers: Iterable[Any], rotations: Sequence[RowRotations], balance: MicroBatchBalance | None
) -> list[BoundUnit | BoundRecurrentUnit]:
    """Returns the units of a stage's layers for one micro-batch."""
    return [
        (BoundRecurrentUnit if hasattr(unit.mixer, "recurrence") else BoundUnit)(unit, rotations, balance)
        for unit in units_in(layers)
    ]
