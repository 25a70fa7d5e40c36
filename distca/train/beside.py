"""What busy stages compute beside attention in a pipeline's phase: idle ones have that time for attention."""

from __future__ import annotations

from dataclasses import dataclass

from distca.plan.cost import CostModel, layer_weights
from distca.train.settings import RunConfig


@dataclass(frozen=True)
class BesideAttention:
    """Seconds per row of a rank's matrix products, for each of its stage's attentions."""

    forward: float
    backward: float


def beside_attention(config: RunConfig, cost: CostModel) -> BesideAttention | None:
    """What busy stages compute beside attention; None where plans level attention alone.

    Norms, rotation and activation are not counted, so an idle stage gets rather too little than too much. A stage of n
    layers computes its linear layers n − 1 times between two attentions; what comes before the first and after the last
    one leaves nothing to serve.

    Args:
        config: a validated run.
        cost: what plans are made with.
    """
    model, tp, layers = config.model, config.parallel.tp, config.model.layers // config.parallel.pp
    rate = cost.linear
    # In one piece, attention and linear layers follow each other: an idle stage could only wait.
    if config.parallel.pp == 1 or not config.cad.ping_pong or config.cad.level == "attention" or rate is None:
        return None
    mlp = 3 * model.hidden * model.ffn
    weights = layer_weights(model.hidden, model.ffn, model.heads, model.kv_heads, model.resolved_head_dim)
    recomputed = {"none": 0, "mlp": mlp, "all": weights}[config.train.recompute]
    each = (layers - 1) / layers / tp
    return BesideAttention(each * weights * rate.forward, each * (weights * rate.backward + recomputed * rate.forward))
