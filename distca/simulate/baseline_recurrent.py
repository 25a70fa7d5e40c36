"""Simulates recurrent layers of baselines, in which a rank computes whole documents.

With context parallelism the ranks of a group exchange heads, as Megatron-Core does. Each rank computes all rows of the
group for its part of the heads. It gets channels of the convolution, the output's gate and the core's gates, and sends
outputs back. Array legend: R data-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.baselines import BaselineError, Mode
from distca.simulate.fabric import Exchange
from distca.simulate.job import VALUE, Job


@dataclass(frozen=True)
class DealtCore:
    """A micro-batch in a recurrent layer.

    Attributes:
        forward: [R] seconds of the core's forward and of copying rows for it.
        backward: [R] seconds of the core's backward and of copies.
        there: the exchange of rows to the ranks of their heads; in backward gradients go the other way, after the core.
        back: the exchange of outputs; in backward it comes before the core.
    """

    forward: np.ndarray
    backward: np.ndarray
    there: Exchange
    back: Exchange


def row_bytes(job: Job) -> tuple[int, int]:
    """Returns the bytes of a row on its way to the ranks of its heads, and on its way back, on one GPU."""
    what = job.recurrence
    values = what.heads * what.value_dim
    gates = what.heads * (2 if what.delta else 1)
    return VALUE * (what.channels + values + gates), VALUE * values


def check_heads(job: Job, mode: Mode) -> None:
    """Refuses a context-parallel group whose ranks cannot share the heads of recurrent layers evenly.

    Raises:
        BaselineError: the number of key heads on a tensor-parallel rank is no multiple of the group's ranks.
    """
    if not any(job.recurrent) or not job.move_heads:
        return
    heads = job.recurrence.key_heads
    if heads % mode.degree:
        raise BaselineError(
            f"{mode.name} shares heads of recurrent layers over {mode.degree} ranks, which do not divide the {heads} "
            "key heads of a tensor-parallel rank; choose fewer ranks."
        )


def deal_core(job: Job, degree: int, rows: np.ndarray) -> DealtCore:
    """Returns the times of a recurrent layer in groups of ``degree`` consecutive ranks that have ``rows`` [R] rows."""
    fabric, core = job.stage_fabric, job.core
    moves = job.move_heads and degree > 1
    there, back = row_bytes(job) if moves else (0, 0)
    mine = np.repeat(rows.reshape(-1, degree).mean(axis=1), degree)
    # Rows are copied twice: into the order of heads for the exchange, and of documents behind it. So are outputs.
    copies = job.copied(2 * rows * (there + back))
    return DealtCore(
        copies + core.whole_forward * mine,
        copies + core.whole_backward * mine,
        fabric.everyone(degree, rows * there / degree),
        fabric.everyone(degree, rows * back / degree),
    )
