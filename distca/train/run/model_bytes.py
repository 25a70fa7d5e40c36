"""Bytes of weights, gradients and the optimizer's state of one rank, by setting."""

from __future__ import annotations

from dataclasses import dataclass

from distca.train.config.schema import RunConfig


@dataclass(frozen=True)
class ModelBytes:
    """What is there in all of a step, and what the optimizer's step needs for itself.

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


def model_bytes(config: RunConfig, parameters: int, in_linears: int, data_parallel: int) -> ModelBytes:
    """Of a rank.

    Args:
        config: the run.
        parameters: of this rank's part of the model.
        in_linears: those of them that are weights of the layers' linear layers.
        data_parallel: ranks that share the distributed optimizer's state.
    """
    train = config.train
    narrow = train.precision == "bf16"
    shards = data_parallel if config.optimizer.distributed else 1
    weights = (2 if narrow else 4) * parameters
    if train.fp8_weights:
        weights -= in_linears
    elif train.fp8 != "none" and train.recompute != "all":
        # Copies for products with the rows of a weight and with its columns; those of recomputed segments are gone.
        weights += 2 * in_linears
    narrow_gradients, narrow_moments = train.gradients == "bfloat16", train.moments == "bfloat16"
    if narrow_moments:
        # Transformer Engine's Adam reads gradients as they are; of float32 weights it keeps what bfloat16 ones lack. A
        # checkpoint takes these and both moments in float32, an update both moments. With FP8 weights megatron has
        # float32 weights, and float32 gradients for the update.
        optimizer, update = (4 if train.fp8_weights else 2) + 2 * 2, 3 * 4
    else:
        # float32 weights are their own main weights. FP8 ones are made of them by way of bfloat16.
        optimizer = (4 if narrow else 0) + 2 * 4
        update = (4 if narrow_gradients else 0) + (2 if train.fp8_weights else 0)
    return ModelBytes(
        weights=weights,
        gradients=(2 if narrow_gradients else 4) * parameters,
        optimizer=optimizer * parameters // shards,
        update=update * parameters // shards,
    )
