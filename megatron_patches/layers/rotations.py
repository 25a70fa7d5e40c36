"""RoPE for models whose layers may differ in RoPE's angles, or have no RoPE.

Megatron's models give the output of one rotary embedding to all layers. :class:`LayerRotary` replaces that embedding.
The output of ``LayerRotary`` is :class:`RowRotations`, from which each layer takes its own rotation.

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
"""Two values in place of a layer's :class:`Rotary`. ``_NONE``: the layer has no RoPE. ``_OWN``: the layer uses the
embedding with which the model was built."""


@dataclass(frozen=True)
class RowRotations:
    """The rotations of some rows in all layers of a pipeline stage.

    Attributes:
        of_layer: maps a layer's number (from 1) to the index of its rotation in ``rotations``.
    """

    rotations: tuple[Rotation, ...]
    of_layer: dict[int, int]

    def of(self, layer_number: int) -> Rotation:
        return self.rotations[self.of_layer[layer_number]]

    def of_nano_batches(self, nano_rows: Sequence[int], chunks: int) -> list[RowRotations]:
        """Returns the rotations of each nano-batch; a micro-batch is one nano-batch, or is split into two.

        Args:
            nano_rows: number of rows of each nano-batch.
            chunks: number of ranks over which sequence parallelism splits the rows; 1 without it.
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
        own: the embedding with which the model was built; None if it has none.
        layers: numbers of this stage's layers; the model's first layer is 1.

    Attributes:
        needs_lengths: whether the angles of any layer, on any stage, depend on the lengths of documents.
    """

    def __init__(
        self, own: PositionRotary | None, config: TransformerConfig, options: ModelOptions, layers: Iterable[int]
    ) -> None:
        super().__init__()
        assert config.kv_channels is not None
        self._head_dim, self._interleaved = config.kv_channels, config.rotary_interleaved
        self._query_scaling = options.query_scaling
        rotaries = [_of_layer(config, options, number) for number in range(1, config.num_layers + 1)]
        of_model = _different(rotaries)
        made = [self._embedding(each, own) for each in of_model]
        self.needs_lengths = any(embedding.needs_lengths for embedding, _ in made if embedding is not None)
        present = {number: rotaries[number - 1] for number in layers}
        of_stage = _different(present.values())
        self._of_layer = {number: of_stage.index(rotary) for number, rotary in present.items()}
        self._embeddings = [made[of_model.index(rotary)] for rotary in of_stage]
        self._positions: torch.Tensor | None = None

    def _embedding(self, rotary: Any, own: PositionRotary | None) -> tuple[PositionRotary | None, float]:
        """Returns the embedding that computes angles, or None for zero angles; and the factor on cosines and sines."""
        if rotary is _NONE:
            return None, 1.0
        if rotary is _OWN:
            return own, 1.0
        dims = int(self._head_dim * rotary.percent)
        embedding = PositionRotary.of(dims, rotary.base, rotary.scaling, interleaved=self._interleaved)
        return embedding, rotary.scaling.resolved_attention_factor

    def set_positions(self, positions: torch.Tensor, lengths: torch.Tensor | None = None) -> None:
        """Sets the positions of the rows of the next forward.

        Args:
            positions: [rows] int64 position of each row in its document.
            lengths: [rows] int64 tokens of each row's document; needed if ``needs_lengths``.

        Raises:
            SupportError: lengths are needed and not given.
        """
        self._positions = positions
        for embedding, _ in self._embeddings:
            if embedding is not None:
                embedding.set_positions(positions, lengths)

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Returns 0, a length that GPTModel gives to :meth:`forward`, which does not read it."""
        return 0

    def forward(self, *_: Any, **__: Any) -> RowRotations:
        assert self._positions is not None, "set_positions was not called for this micro-batch"
        scale = None if self._query_scaling is None else query_scale(self._query_scaling, self._positions)
        rotations = tuple(
            replace(self._rotation(*each, self._positions), query_scale_N=scale) for each in self._embeddings
        )
        return RowRotations(rotations, self._of_layer)

    def _rotation(self, embedding: PositionRotary | None, factor: float, positions: torch.Tensor) -> Rotation:
        if embedding is None:  # a rotation by zero changes no value
            return Rotation.of(torch.zeros(len(positions), 1, 1, self._head_dim, device=positions.device))
        rotation = Rotation.of(embedding(), self._head_dim, self._interleaved)
        if factor == 1.0:
            return rotation
        return replace(rotation, cos_NE=rotation.cos_NE * factor, sin_NE=rotation.sin_NE * factor)


def _different(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _of_layer(config: TransformerConfig, options: ModelOptions, number: int) -> Any:
    if config.no_rope_freq and config.no_rope_freq[number - 1]:
        return _NONE
    rotary: Rotary | None = options.rotations[number - 1] if options.rotations else None
    return _OWN if rotary is None else rotary


def query_scale(scaling: QueryScaling, positions: torch.Tensor) -> torch.Tensor:
    """Returns [rows] float32 factors on queries: 1 + beta · ln(1 + floor(position / original_length)).

    ``positions`` has [rows] int64 positions of rows in their documents."""
    return 1 + scaling.beta * torch.log1p(torch.floor(positions / scaling.original_length))
