"""What busy stages compute beside attention in a pipeline's phase: idle ones have that time for attention."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from distca.errors import ConfigError
from distca.plan.cost.model import CostModel, layer_weights
from distca.train.config.schema import RunConfig
from distca.train.run.stage_layers import most_layers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BesideAttention:
    """Seconds per row of a rank's matrix products, for each of its stage's attentions."""

    forward: float
    backward: float


def beside_attention(config: RunConfig, cost: CostModel, on_gpu: bool) -> BesideAttention | None:
    """What busy stages compute beside attention; None where plans level attention alone (cad.level).

    Norms, rotation and activation are not counted, so an idle stage gets rather too little than too much. A stage of n
    layers computes its linear layers n − 1 times between two attentions; what comes before the first and after the last
    one leaves nothing to serve.

    Args:
        config: a validated run.
        cost: what plans are made with.
        on_gpu: where; ranks on CPUs may share cores, and then a stage that waits leaves them to others.

    Raises:
        ConfigError: the cost model knows no linear layers.
    """
    cad, rate = config.cad, cost.linear
    if not cad.enabled or cad.level == "attention":
        return None
    # Idle servers get more rows at once, and where NVSHMEM alone may carry them its memory was made for fewer.
    usual = on_gpu and config.parallel.pp > 1 and cad.ping_pong and cad.transport != "nvshmem"
    if cad.level == "auto" and not usual:
        return None
    if cad.level == "auto" and rate is None:
        logger.info(
            "Phases level attention alone: the cost table has no linear layers; `distca profile` measures them."
        )
        return None
    model, tp, layers = config.model, config.parallel.tp, most_layers(config)
    if rate is None:
        raise ConfigError(
            "cad.level is time, but no cost table of this device and kernel says what linear layers take; measure one "
            "with `distca profile` (docs/profiling.md), or set cad.level to attention."
        )
    mlp = 3 * model.hidden * model.ffn
    weights = layer_weights(model.hidden, model.ffn, model.heads, model.kv_heads, model.resolved_head_dim)
    recomputed = {"none": 0, "mlp": mlp, "all": weights}[config.train.recompute]
    each = (layers - 1) / layers / tp
    return BesideAttention(each * weights * rate.forward, each * (weights * rate.backward + recomputed * rate.forward))
