"""1F1B: when every stage is done with which micro-batch, of all pipelines at once.

Array legend: M micro-batches, S stages, L lanes (data-parallel ranks, whose pipelines do not wait for each other).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Pass:
    """A stage's forward or backward of a micro-batch; [L] seconds from the step's start."""

    stage: int
    micro_batch: int
    direction: Literal["forward", "backward"]
    start: np.ndarray
    end: np.ndarray


def order(stage: int, stages: int, micro_batches: int) -> Iterator[tuple[Literal["forward", "backward"], int]]:
    """The order of a stage's passes: forwards until the pipeline is full, then one backward after each forward, then
    backwards."""
    ahead = min(stages - 1 - stage, micro_batches)
    for number in range(micro_batches + ahead):
        if number < micro_batches:
            yield "forward", number
        if number >= ahead:
            yield "backward", number - ahead


def run(forward: np.ndarray, backward: np.ndarray, hop: np.ndarray) -> list[Pass]:
    """All passes, in an order in which each comes behind those that it waits for.

    Args:
        forward: [M, S, L] seconds of a forward.
        backward: [M, S, L] seconds of a backward.
        hop: [M, L] seconds in which activations or gradients travel to a neighbouring stage.
    """
    micro_batches, stages, lanes = forward.shape
    queues = [list(order(stage, stages, micro_batches)) for stage in range(stages)]
    free = np.zeros((stages, lanes))
    ends: dict[tuple[str, int, int], np.ndarray] = {}
    passes: list[Pass] = []
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                direction, number = queue[0]
                ahead = stage - 1 if direction == "forward" else stage + 1
                arrived = np.zeros(lanes)
                if 0 <= ahead < stages:
                    if (direction, ahead, number) not in ends:
                        break
                    arrived = ends[direction, ahead, number] + hop[number]
                elif direction == "backward":
                    arrived = ends["forward", stage, number]
                start = np.maximum(free[stage], arrived)
                end = start + (forward if direction == "forward" else backward)[number, stage]
                ends[direction, stage, number] = free[stage] = end
                passes.append(Pass(stage, number, direction, start, end))
                queue.pop(0)
    return passes
