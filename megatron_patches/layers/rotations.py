"""RoPE for models whose layers may rotate queries and keys by different angles, or not at all.

A GPTModel has one rotary embedding, whose output it hands to every layer. ``CAD.attach`` puts :class:`LayerRotary` in
its place. That computes each different rotation once per micro-batch, from every row's position in its document, and
returns :class:`RowRotations`, from which a layer takes its own. Layers without positions get a rotation by zero.

Shape suffixes: N rows (tokens), E rotated pairs of a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from distca.ops.rotary import Rotation
from megatron_patches.model.model_options import ModelOptions, QueryScaling, Rotary
from megatron_patches.patches.position_rotary import PositionRotary
from megatron_patches.steps.batch_context import gather_nano_rows

_NONE, _OWN = object(), object()
"""The rotation of a layer without positions, and the one of the embedding with which the model was built."""


@dataclass(frozen=True)
class RowRotations:
    """The rotations of a micro-batch's or a nano-batch's rows, in all layers of a pipeline stage.

    Attributes:
        rotations: the different rotations, each once.
        of_layer: index in ``rotations`` of each layer's rotation, by Megatron's number of the layer.
    """

    rotations: tuple[Rotation, ...]
    of_layer: dict[int, int]

    def of(self, layer_number: int) -> Rotation:
        """Returns the rotation of a layer."""
        return self.rotations[self.of_layer[layer_number]]

    def of_nano_batches(self, nano_rows: Sequence[int], chunks: int) -> list[RowRotations]:
        """Returns the rotations of each nano-batch. A micro-batch is computed as two nano-batches.

        Args:
            nano_rows: number of rows of each nano-batch.
            chunks: number of tensor-parallel ranks that share the rows; :func:`gather_nano_rows` tells their order.
        """

        def gather(x: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
            return [None] * len(nano_rows) if x is None else gather_nano_rows(x, nano_rows, chunks)

        of_nano: list[list[Rotation]] = [[] for _ in nano_rows]
        for each in self.rotations:
            parts = zip(gather(each.cos_NE), gather(each.sin_NE), gather(each.query_scale_N), strict=True)
            for rotations, (cos, sin, scale) in zip(of_nano, parts, strict=True):
                assert cos is not None and sin is not None
                rotations.append(replace(each, cos_NE=cos, sin_NE=sin, query_scale_N=scale))
        return [RowRotations(tuple(each), self.of_layer) for each in of_nano]


class LayerRotary(torch.nn.Module):
    """Takes the place of a model's rotary embedding, and returns :class:`RowRotations`.

    Args:
        own: the embedding with which the model was built; None if it was built without positions.
        config: Megatron's configuration.
        options: the model's options.
        layers: Megatron's numbers of this stage's layers.
    """

    def __init__(
        self, own: PositionRotary | None, config: TransformerConfig, options: ModelOptions, layers: Iterable[int]
    ) -> None:
        super().__init__()
        assert config.kv_channels is not None
        self._head_dim, self._interleaved = config.kv_channels, config.rotary_interleaved
        self._query_scaling = options.query_scaling
        # Whether lengths are needed must be the same on all stages, so embeddings of all layers are made. This stage
        # then keeps those of its own layers.
        rotaries = [_of_layer(config, options, number) for number in range(1, config.num_layers + 1)]
        every = _different(rotaries)
        made = [self._embedding(each, own) for each in every]
        self.needs_lengths = any(embedding.needs_lengths for embedding, _ in made if embedding is not None)
        present = {number: rotaries[number - 1] for number in layers}
        kinds = _different(present.values())
        self._of_layer = {number: kinds.index(kind) for number, kind in present.items()}
        self._embeddings = [made[every.index(kind)] for kind in kinds]
        self._positions: torch.Tensor | None = None

    def _embedding(self, rotary: Any, own: PositionRotary | None) -> tuple[PositionRotary | None, float]:
        """Returns the embedding that computes a rotation's angles, and the factor on its cosines and sines.

        Args:
            rotary: a :class:`Rotary`, or ``_OWN``, or ``_NONE``, for which the embedding is None.
            own: the embedding with which the model was built.
        """
        if rotary is _NONE:
            return None, 1.0
        if rotary is _OWN:
            return own, 1.0
        dims = int(self._head_dim * rotary.percent)
        embedding = PositionRotary.of(dims, rotary.base, rotary.scaling, interleaved=self._interleaved)
        return embedding, rotary.scaling.resolved_attention_factor

    def set_positions(self, positions: torch.Tensor, lengths: torch.Tensor | None = None) -> None:
        """Sets the positions of the next forward's rows; arguments as in :meth:`PositionRotary.set_positions`.

        Raises:
            SupportError: lengths are needed and not given.
        """
        self._positions = positions
        for embedding, _ in self._embeddings:
            if embedding is not None:
                embedding.set_positions(positions, lengths)

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Returns 0: GPTModel asks for a length before it calls this module, but the angles do not depend on it."""
        return 0

    def forward(self, *_: Any, **__: Any) -> RowRotations:
        """Returns the rotations of the rows whose positions were set."""
        assert self._positions is not None, "set_positions was not called for this micro-batch"
        scale = None if self._query_scaling is None else query_scale(self._query_scaling, self._positions)
        rotations = tuple(
            replace(self._rotation(*each, self._positions), query_scale_N=scale) for each in self._embeddings
        )
        return RowRotations(rotations, self._of_layer)

    def _rotation(self, embedding: PositionRotary | None, factor: float, positions: torch.Tensor) -> Rotation:
        """Returns an embedding's rotation of the rows at these positions."""
        if embedding is None:  # a rotation by zero changes no bit, so kernels need no case without rotation
            return Rotation.of(torch.zeros(len(positions), 1, 1, self._head_dim, device=positions.device))
        rotation = Rotation.of(embedding(), self._head_dim, self._interleaved)
        if factor == 1.0:
            return rotation
        return replace(rotation, cos_NE=rotation.cos_NE * factor, sin_NE=rotation.sin_NE * factor)


def _different(values: Iterable[Any]) -> list[Any]:
    """Returns each value once, in order of first appearance. Values need not be hashable: a Rotary may hold lists."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _of_layer(config: TransformerConfig, options: ModelOptions, number: int) -> Any:
    """Returns a layer's rotation: a :class:`Rotary`, ``_OWN`` or ``_NONE``; ``number`` is Megatron's, from 1."""
    if config.no_rope_freq and config.no_rope_freq[number - 1]:
        return _NONE
    rotary: Rotary | None = options.rotations[number - 1] if options.rotations else None
    return _OWN if rotary is None else rotary


def query_scale(scaling: QueryScaling, positions: torch.Tensor) -> torch.Tensor:
    """Returns [rows] float32 factors on the queries of rows at [rows] int64 positions in their documents."""
    return 1 + scaling.beta * torch.log1p(torch.floor(positions / scaling.original_length))
