"""How many layers each pipeline stage has: the last one, which also computes the output layer, may have fewer."""

from __future__ import annotations

from distca.plan.cost.model import layer_weights
from distca.plan.pipeline import StageLayers
from distca.train.config.schema import RunConfig

_ATTENTION = 1.0
"""Attention's share of a layer's time over that of its linear layers, about: beside long documents it is more."""


def stage_layers(config: RunConfig, vocabulary: int) -> StageLayers:
    """Layers of the stages of a validated run.

    While the last stage computes the output layer, the others are at layers that it does not have. During as many of
    these as take about so long, but one at least, it serves nothing. (Output layer: one product in forward; in backward
    three, beside two of a layer's.)

    Args:
        config: a validated run.
        vocabulary: rows of the output layer.
    """
    most, last = most_layers(config), config.parallel.last_stage_layers
    if last is None:
        return StageLayers(most, most)
    forward = _output_layers(config, vocabulary) / (1 + _ATTENTION)
    during = [min(max(round(layers), 1), most - last) for layers in (forward, 3 / 2 * forward)]
    return StageLayers(most, last, *during)


def most_layers(config: RunConfig) -> int:
    """Layers of every stage of a validated run but the last."""
    layers, stages, last = config.model.layers, config.parallel.pp, config.parallel.last_stage_layers
    return layers // stages if last is None else (layers - last) // (stages - 1)


def last_stage_layers_that_fit(layers: int, stages: int) -> list[int]:
    """What parallel.last_stage_layers may be: no more than the others have, who share the rest evenly."""
    return [last for last in range(1, layers // stages + 1) if (layers - last) % (stages - 1) == 0]


def _output_layers(config: RunConfig, vocabulary: int) -> float:
    """How many layers' matrix products the output layer's is as long as."""
    model = config.model
    weights = layer_weights(model.hidden, model.ffn, model.heads, model.kv_heads, model.resolved_head_dim)
    return vocabulary * model.hidden / weights
