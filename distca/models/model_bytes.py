"""Bytes of weights, gradients and the optimizer's state of one rank, by setting."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from distca.sizes.fp8_shapes import Fp8


@dataclass(frozen=True)
class ModelBytes:
    """Bytes that are there in all of a step, and bytes that the optimizer's step needs for itself.

    Attributes:
        weights: parameters as the layers use them, and FP8 copies of them.
        gradients: buffers in which they are added up.
        optimizer: main weights and Adam's moments on this rank.
        update: float32 copies while the optimizer's step runs or a checkpoint is taken, beside no activations.
    """

    weights: int
    gradients: int
    optimizer: int
    update: int

    @property
    def held(self) -> int:
        """In all of a step."""
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: ModelBytes) -> ModelBytes:
        """The sum of both."""
        return ModelBytes(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, kw_only=True)
class StateTypes:
    """The types of numbers in which a rank holds its weights, gradients and optimizer state.

    Attributes:
        narrow: weights are bfloat16, beside float32 main weights; else float32.
        narrow_gradients: gradients are added up in bfloat16; else in float32.
        narrow_moments: Adam's moments are bfloat16; else float32.
        fp8: how linear layers scale tensors to FP8.
        fp8_weights: their weights are held as FP8 numbers alone.
        recompute_all: all but core attention is computed again in backward.
    """

    narrow: bool = True
    narrow_gradients: bool = False
    narrow_moments: bool = False
    fp8: Fp8 = "none"
    fp8_weights: bool = False
    recompute_all: bool = False

    def bytes_of(self, parameters: int, in_linears: int, shards: int) -> ModelBytes:
        """Returns the bytes of a rank's weights, gradients and optimizer state.

        Args:
            parameters: of this rank's part of the model.
            in_linears: those of them that are weights of the layers' linear layers.
            shards: ranks that share the optimizer's state.
        """
        weights = (2 if self.narrow else 4) * parameters
        if self.fp8_weights:
            weights -= in_linears
        elif self.fp8 != "none" and not self.recompute_all:
            # Copies for products with the rows of a weight and with its columns; recomputed segments' are gone.
            weights += 2 * in_linears
        if self.narrow_moments:
            # Transformer Engine's Adam reads gradients as they are; of float32 weights it keeps what bfloat16 ones
            # lack. A checkpoint takes these and both moments in float32, an update both moments. With FP8 weights
            # megatron has float32 weights, and float32 gradients for the update.
            optimizer, update = (4 if self.fp8_weights else 2) + 2 * 2, 3 * 4
        else:
            # float32 weights are their own main weights. FP8 ones are made of them by way of bfloat16.
            optimizer = (4 if self.narrow else 0) + 2 * 4
            update = (4 if self.narrow_gradients else 0) + (2 if self.fp8_weights else 0)
        return ModelBytes(
            weights=weights,
            gradients=(2 if self.narrow_gradients else 4) * parameters,
            optimizer=optimizer * parameters // shards,
            update=update * parameters // shards,
        )
