"""Groups a model's layers into units, which ``distca/runtime/ping_pong.py`` runs one after the other.

A *mixer* is attention or a recurrence. The mixer's *core* is softmax(QKᵀ)V, which other ranks may compute, or the
recurrence without projections. A *unit* is a mixer with all MLPs and experts up to the next mixer. The first unit of a
pipeline stage also has those ahead of its mixer. Each layer of a GPTModel is a unit. In a HybridModel, mixers and MLPs
are separate layers, so a unit may have several layers.

A micro-batch has one or two *nano-batches*. For each, a unit's ``pre`` runs first, then the core, and ``post`` last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp

from distca.recurrent import CoreParameters, Recurrence, RecurrentKernel
from megatron_patches.experts.balance import MicroBatchBalance, NanoBatch
from megatron_patches.experts.layer import Parts
from megatron_patches.layers.layer import SplitTransformerLayer
from megatron_patches.layers.rotations import RowRotations


@dataclass
class Unit:
    """One unit.

    Attributes:
        mixer: the layer with attention or a recurrence.
        before: in a pipeline stage's first unit, the layers with MLPs or experts ahead of the mixer; empty in others.
        behind: the layers with the MLPs or experts behind the mixer; in a GPTModel this is [mixer].
    """

    mixer: Any
    before: Sequence[SplitTransformerLayer]
    behind: list[SplitTransformerLayer]


def units_in(layers: Iterable[Any]) -> list[Unit]:
    """Returns the units of a pipeline stage's layers, in order."""
    units: list[Unit] = []
    before: list[SplitTransformerLayer] = []
    for layer in layers:
        # A layer without a mixer has IdentityOp as ``self_attention``. Mamba's layer has no ``self_attention`` and no
        # ``mlp``.
        if not isinstance(getattr(layer, "self_attention", None), IdentityOp):
            units.append(Unit(layer, before, []))
            before = []
        if not isinstance(getattr(layer, "mlp", IdentityOp()), IdentityOp):
            (units[-1].behind if units else before).append(layer)
    return units


@dataclass(frozen=True)
class _Bound:
    """A unit and what it needs of one micro-batch.

    In methods, ``hidden`` is [rows, 1, hidden], the rows of nano-batch ``nano`` (0 or 1).

    Attributes:
        rotations: for each nano-batch, RoPE's rotations of its rows.
        balance: counts the rows of each expert; None in models without experts.
    """

    unit: Unit
    rotations: Sequence[RowRotations]
    balance: MicroBatchBalance | None

    def post(self, o: torch.Tensor, *residual: torch.Tensor, nano: int) -> torch.Tensor:
        """Returns the unit's output, [rows, 1, hidden].

        Args:
            o: the core's output.
            residual: the tensors that ``pre`` returned ahead of the core's inputs.
        """
        last, nano_batch = self.unit.mixer, self._nano_batch(nano)
        branch, hidden = last.mixed(o, *residual)
        for last in self.unit.behind:
            branch, hidden = last.behind(branch, hidden, nano_batch)
        output: torch.Tensor = last.added(branch, hidden)
        return output

    @property
    def has_exchanges(self) -> bool:
        """Whether :meth:`post` sends rows to experts."""
        return any(layer.has_exchanges for layer in self.unit.behind)

    def post_parts(self, o: torch.Tensor, *residual: torch.Tensor, nano: int) -> Parts:
        """:meth:`post` as a generator. In each layer with experts it yields twice: while rows travel to experts, and
        while the experts' outputs travel back."""
        last, nano_batch = self.unit.mixer, self._nano_batch(nano)
        branch, hidden = last.mixed(o, *residual)
        for last in self.unit.behind:
            branch, hidden = yield from last.behind_parts(branch, hidden, nano_batch)
        output: torch.Tensor = last.added(branch, hidden)
        return output

    def _first(self, hidden: torch.Tensor, nano: int) -> torch.Tensor:
        for layer in self.unit.before:
            hidden = layer.added(*layer.behind(None, hidden, self._nano_batch(nano)))
        return hidden

    def _nano_batch(self, nano: int) -> NanoBatch | None:
        return None if self.balance is None else self.balance.nano_batch(nano)


@dataclass(frozen=True)
class BoundUnit(_Bound):
    @property
    def sink(self) -> torch.Tensor | None:
        """[this rank's heads] the learned sinks; None without sinks. A sink is one more score in a head's softmax."""
        sink: torch.Tensor | None = self.unit.mixer.self_attention.core_attention.softmax_offset
        return sink

    def pre(self, hidden: torch.Tensor, nano: int) -> tuple[torch.Tensor, ...]:
        """Computes everything before core attention.

        Returns:
            Tensors for :meth:`post`, then queries, then keys and values in one tensor.
        """
        mixer = self.unit.mixer
        made: tuple[torch.Tensor, ...] = mixer.pre(
            self._first(hidden, nano), self.rotations[nano].of(mixer.layer_number)
        )
        return made


@dataclass(frozen=True)
class BoundRecurrentUnit(_Bound):
    """A unit with a recurrence, to which RoPE does not apply."""

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
        """Computes everything before the core.

        Returns:
            Tensors for :meth:`post`, then the core's inputs.
        """
        made: tuple[torch.Tensor, ...] = self.unit.mixer.pre(self._first(hidden, nano))
        return made


def bound_units(
    layers: Iterable[Any], rotations: Sequence[RowRotations], balance: MicroBatchBalance | None
) -> list[BoundUnit | BoundRecurrentUnit]:
    """Returns the units of a pipeline stage's layers for one micro-batch."""
    return [
        (BoundRecurrentUnit if hasattr(unit.mixer, "recurrence") else BoundUnit)(unit, rotations, balance)
        for unit in units_in(layers)
    ]
