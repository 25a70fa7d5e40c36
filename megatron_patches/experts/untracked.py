"""Warns that Megatron's own log leaves out the balancing losses of models that ``distca.CAD`` attached, or shows 0.

Routers of such models never compute a balancing loss, only its gradient (``balance.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils

logger = logging.getLogger(__name__)

_LOGS = "reduce_aux_losses_tracker_across_ranks"
"""The function that ``track_moe_metrics`` calls in versions without ``MoEMetricsTracker``."""


def warn_when_logged() -> None:
    """Makes ``track_moe_metrics`` and ``MoEMetricsTracker.report`` warn at their first call in rank 0's process."""
    try:
        from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
    except ImportError:
        owner, name = moe_utils, _LOGS
    else:
        owner, name = MoEMetricsTracker, "report"
    log = getattr(owner, name)
    if not hasattr(log, "warned"):
        setattr(owner, name, _warning(log))


def _warning(log: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(log)
    def warning(*args: Any, **named: Any) -> Any:
        if not warning.warned and dist.get_rank() == 0:  # type: ignore[attr-defined]
            logger.warning(
                "Megatron's log of MoE metrics leaves out models that CAD attached, or shows 0 for their balancing "
                "losses: CAD.expert_loads says how rows are spread over experts."
            )
        warning.warned = True  # type: ignore[attr-defined]
        return log(*args, **named)

    warning.warned = False  # type: ignore[attr-defined]
    return warning
