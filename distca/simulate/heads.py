"""Recurrent layers without disaggregation: whole documents, which context parallelism gets by an exchange of heads.

Each rank of a group sends every other one its rows of that one's heads, as Megatron-Core does: channels of the
convolution, the output's gate and the gates of the core; outputs come back. Array legend: R data-parallel ranks.
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
        forward: [R] seconds of the core and of putting rows together for it.
        backward: [R] seconds.
        there: rows to the ranks of their heads; backward has it behind the core.
        back: outputs; backward has it before the core.
    """

    forward: np.ndarray
    backward: np.ndarray
    there: Exchange
    back: Exchange


def row_bytes(job: Job) -> tuple[int, int]:
    """Bytes of a row on its way to the ranks of its heads, and back, of one tensor-parallel rank."""
    what = job.recurrence
    values = what.heads * what.value_dim
    gates = what.heads * (2 if what.delta else 1)
    return VALUE * (what.channels + values + gates), VALUE * values


def check_heads(job: Job, mode: Mode) -> None:
    """Refuse a group whose ranks cannot share the heads of recurrent layers.

    Raises:
        BaselineError: it has more ranks than a tensor-parallel rank has key heads, or these are no multiple of it.
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
    """Deal a recurrent layer of ``rows`` [R] rows in groups of ``degree`` ranks, each of which computes all rows of its
    heads."""
    fabric, core = job.stage_fabric, job.core
    moves = job.move_heads and degree > 1
    there, back = row_bytes(job) if moves else (0, 0)
    mine = np.repeat(rows.reshape(-1, degree).mean(axis=1), degree)
    # Rows are put in the order of heads, and tokens in that of documents; outputs likewise.
    copies = job.copied(2 * rows * (there + back))
    return DealtCore(
        copies + core.whole_forward * mine,
        copies + core.whole_backward * mine,
        fabric.everyone(degree, rows * there / degree),
        fabric.everyone(degree, rows * back / degree),
    )
