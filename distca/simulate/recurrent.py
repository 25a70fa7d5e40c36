"""Recurrent layers with disaggregation: pieces are computed where they lie, halos and summaries travel.

What a rank computes when is that of ``distca.runtime.recurrent_call``, who sends what that of
``distca.plan.recurrent``. Array legend: R ranks of the pool, over all stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.plan.layout import Layout
from distca.plan.metrics import PairRows
from distca.plan.recurrent.traffic import RecurrentNano, recurrent_nanos
from distca.simulate.fabric import Exchange
from distca.simulate.job import VALUE, Job


@dataclass(frozen=True)
class CoreHalf:
    """One nano-batch of a phase in a recurrent layer, in one direction.

    Attributes:
        before: [R] seconds between the two exchanges: summaries and what needs no state; in backward what needs
            gradients of states.
        rest: [R] seconds behind the second exchange, which brings states; in backward before the first one, which
            brings their gradients.
        there: the first exchange: of halo rows; in backward of gradients of states.
        back: the second: of summaries; in backward of gradients of halo rows.
    """

    before: np.ndarray
    rest: np.ndarray
    there: Exchange
    back: Exchange


class Recurrent:
    """Prices the recurrent layers of a step.

    Args:
        job: what runs.
        layouts: by micro-batch, of its nano-batches.
    """

    def __init__(self, job: Job, layouts: Sequence[tuple[Layout, ...]]) -> None:
        self._job, self._layouts = job, layouts
        self._counted: dict[int, tuple[RecurrentNano, ...]] = {}

    def halves(self, micro_batches: Sequence[int | None], direction: str) -> list[CoreHalf]:
        """The nano-batches of a phase in which each stage runs a micro-batch, or nothing."""
        of_stages = [None if m is None else self.counted(m) for m in micro_batches]
        return [
            self._half([None if each is None else each[nano] for each in of_stages], direction)
            for nano in range(len(self._layouts[0]))
        ]

    def counted(self, micro_batch: int) -> tuple[RecurrentNano, ...]:
        """The rows and summaries of a micro-batch's nano-batches, over the ranks of one stage."""
        if micro_batch not in self._counted:
            layouts = self._layouts[micro_batch]
            self._counted[micro_batch] = recurrent_nanos(layouts, self._job.recurrence.halo_rows)
        return self._counted[micro_batch]

    def _half(self, of_stages: Sequence[RecurrentNano | None], direction: str) -> CoreHalf:
        job, what, core = self._job, self._job.recurrence, self._job.core
        before, rest = np.zeros((2, job.servers))
        halo, states = [], []
        for stage, half in enumerate(of_stages):
            if half is None:
                continue
            here = slice(stage * job.data_parallel, (stage + 1) * job.data_parallel)
            rows = half.only + half.first + half.inner + half.last
            summaries = half.forward if direction == "forward" else half.backward
            # Each summary that is read is multiplied into a state and added: read, and written once.
            counts = float(job.move_summaries)
            folding = job.copied(1.5 * counts * summaries.read_bytes(what))
            if direction == "forward":
                before[here] = core.convolution * rows + core.forward * (half.only + half.first + half.inner)
                rest[here] = folding + core.forward * (half.inner + half.last)
            else:
                rest[here] = core.convolution * rows + core.backward * (half.only + half.last)
                rest[here] += core.forward * half.inner
                before[here] = folding + core.backward * (half.first + half.inner)
                before[here] += (core.convolution + core.convolution_backward) * rows
            halo.append((stage, half.halo, what.channels * VALUE))
            states.append((stage, summaries.states, counts * what.state_bytes))
            states.append((stage, summaries.transitions, counts * what.transition_bytes))
        if direction == "forward":
            return CoreHalf(before, rest, self._exchange(halo), self._exchange(states))
        return CoreHalf(before, rest, self._exchange(states), self._exchange(halo, back=True))

    def _exchange(self, parts: Sequence[tuple[int, PairRows, float]], back: bool = False) -> Exchange:
        """Rows of so many bytes each within a stage, or their gradients, which go the other way."""
        ranks, servers = self._job.data_parallel, self._job.servers
        home = np.concatenate([stage * ranks + pairs.home for stage, pairs, _ in parts])
        reader = np.concatenate([stage * ranks + pairs.server for stage, pairs, _ in parts])
        size = np.concatenate([pairs.rows * each for _, pairs, each in parts])
        pairs, number = np.unique(home * servers + reader, return_inverse=True)
        home, reader = np.divmod(pairs, servers)
        size = np.bincount(number, size, len(pairs))
        return self._job.fabric.exchange(*((reader, home) if back else (home, reader)), size)
