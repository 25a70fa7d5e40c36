"""Simulates the pipeline schedule 1F1B: computes when each stage begins and ends each micro-batch.

Array legend: M micro-batches, S stages, L data-parallel ranks. The pipelines of the L ranks do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Pass:
    """A stage's forward or backward of a micro-batch.

    Attributes:
        stage: number of the stage.
        micro_batch: number of the micro-batch.
        direction: "forward" or "backward".
        start: [L] its start, in seconds from the step's start.
        end: [L] its end.
    """

    stage: int
    micro_batch: int
    direction: Literal["forward", "backward"]
    start: np.ndarray
    end: np.ndarray


def order(stage: int, stages: int, micro_batches: int) -> Iterator[tuple[Literal["forward", "backward"], int]]:
    """Yields a stage's passes in order: forwards until the pipeline is full, then a backward after each forward, then
    the last backwards."""
    ahead = min(stages - 1 - stage, micro_batches)
    for number in range(micro_batches + ahead):
        if number < micro_batches:
            yield "forward", number
        if number >= ahead:
            yield "backward", number - ahead


def run(forward: np.ndarray, backward: np.ndarray, hop: np.ndarray) -> list[Pass]:
    """Returns all passes, sorted so that a pass comes after those for which it waits.

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
