"""How many layers each pipeline stage has: the last one, which also computes the output layer, may have fewer."""

from __future__ import annotations

import logging

from distca.plan.cost import layer_weights
from distca.plan.phases import StageLayers
from distca.train.settings import RunConfig

logger = logging.getLogger(__name__)

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


def advise_stage_layers(config: RunConfig, vocabulary: int) -> None:
    """Say which parallel.last_stage_layers would make phases shorter, by the matrix products of the slowest stage."""
    layers, stages = config.model.layers, config.parallel.pp
    if stages == 1 or not config.cad.enabled or config.parallel.last_stage_layers is not None:
        return
    output, even = _output_layers(config, vocabulary), layers // stages
    slowest = {even: even + output}
    for last in range(1, even):
        if (layers - last) % (stages - 1) == 0:
            most = (layers - last) // (stages - 1)
            slowest[last] = (max(most, last + output) + max(2 * most, 2 * last + 3 * output)) / 3
    best = min(slowest, key=lambda last: slowest[last])
    if best != even:
        logger.info(
            "The last stage's output layer is as long as %.1f layers: parallel.last_stage_layers %d would shorten what "
            "all stages wait for from %.1f layers to %.1f, attention aside.",
            output,
            best,
            slowest[even],
            slowest[best],
        )


def _output_layers(config: RunConfig, vocabulary: int) -> float:
    """How many layers' matrix products the output layer's is as long as."""
    model = config.model
    weights = layer_weights(model.hidden, model.ffn, model.heads, model.kv_heads, model.resolved_head_dim)
    return vocabulary * model.hidden / weights
