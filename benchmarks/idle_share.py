"""How much of a recorded step a rank's compute stream was idle: the pipeline's bubbles and every other wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def idle_shares(trace: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Share of a step in which each rank computed nothing of the model, from the trace of exactly that step.

    The step lasts from the first computation of any rank to the last one of any rank; the optimizer's step and the
    reduction of gradients lie after it. Computation is what the tracks "compute ping", "compute pong" and "stage" hold.
    Under ticks these spans leave out the waits for attention rows and also their packing. So idle is counted too high
    rather than too low there. A micro-batch's forward or backward under 1F1B is one span.

    Args:
        trace: events of a timeline.json.

    Returns:
        By rank, a share between 0 and 1; empty where nothing was recorded.
    """
    events = list(trace)
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X" and tracks[event["pid"], event["tid"]] in ("compute ping", "compute pong", "stage"):
            spans.setdefault(event["pid"], []).append((event["ts"], event["ts"] + event["dur"]))
    if not spans:
        return {}
    begin = min(start for mine in spans.values() for start, _ in mine)
    end = max(stop for mine in spans.values() for _, stop in mine)
    return {rank: 1 - _covered(mine) / (end - begin) for rank, mine in sorted(spans.items())}


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union."""
    starts, stops = np.array(sorted(spans)).T
    reached = np.maximum.accumulate(stops)
    before = np.concatenate(([-np.inf], reached[:-1]))
    return float(np.maximum(reached - np.maximum(starts, before), 0).sum())
