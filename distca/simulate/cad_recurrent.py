"""Simulates recurrent layers with DistCA.

A document's rows lie on several ranks, in pieces. Each rank computes its own pieces. Two kinds of rows travel. Halo
rows are the last rows before a piece, which its convolution reads. A summary says how a piece changes the state of the
recurrence; later pieces need the summaries of earlier ones. The order of a rank's work is as in
``distca.runtime.recurrent_call``. The exchanged rows are those of ``distca.plan.recurrent``.

Array legend: R servers of all pipeline stages.
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
class CoreNanoBatch:
    """One nano-batch of a phase in a recurrent layer, in one direction.

    Attributes:
        before: [R] seconds between the two exchanges. In forward a rank computes summaries there, and pieces that need
            no state. In backward it computes the parts that need gradients of states.
        rest: [R] seconds of the other work: after the second exchange in forward, before the first one in backward.
        there: the first exchange: halo rows in forward, gradients of states in backward.
        back: the second exchange: summaries in forward, gradients of halo rows in backward.
    """

    before: np.ndarray
    rest: np.ndarray
    there: Exchange
    back: Exchange


class Recurrent:
    """Computes the times and exchanges of a step's recurrent layers.

    Args:
        job: the model, the cluster and the parallelism.
        layouts: for each micro-batch, the layouts of its nano-batches, which say where rows lie.
    """

    def __init__(self, job: Job, layouts: Sequence[tuple[Layout, ...]]) -> None:
        self._job, self._layouts = job, layouts
        self._counted: dict[int, tuple[RecurrentNano, ...]] = {}

    def nano_batches(self, micro_batches: Sequence[int | None], direction: str) -> list[CoreNanoBatch]:
        """Returns the nano-batches of a phase. ``micro_batches`` are those of the stages; None is an idle stage."""
        of_stages = [None if m is None else self.counted(m) for m in micro_batches]
        return [
            self._nano_batch([None if each is None else each[nano] for each in of_stages], direction)
            for nano in range(len(self._layouts[0]))
        ]

    def counted(self, micro_batch: int) -> tuple[RecurrentNano, ...]:
        """Returns how many rows and summaries a micro-batch's nano-batches have, on the ranks of one stage."""
        if micro_batch not in self._counted:
            layouts = self._layouts[micro_batch]
            self._counted[micro_batch] = recurrent_nanos(layouts, self._job.recurrence.halo_rows)
        return self._counted[micro_batch]

    def _nano_batch(self, of_stages: Sequence[RecurrentNano | None], direction: str) -> CoreNanoBatch:
        """Returns a nano-batch of all stages from the counts of each."""
        job, what, core = self._job, self._job.recurrence, self._job.core
        before, rest = np.zeros((2, job.servers))
        halo, states = [], []
        for stage, batch in enumerate(of_stages):
            if batch is None:
                continue
            here = slice(stage * job.data_parallel, (stage + 1) * job.data_parallel)
            rows = batch.only + batch.first + batch.inner + batch.last
            summaries = batch.forward if direction == "forward" else batch.backward
            # A summary that is read is multiplied with a state and added, which takes about 1.5 copies of it.
            counts = float(job.move_summaries)
            folding = job.copied(1.5 * counts * summaries.read_bytes(what))
            if direction == "forward":
                before[here] = core.convolution * rows + core.forward * (batch.only + batch.first + batch.inner)
                rest[here] = folding + core.forward * (batch.inner + batch.last)
            else:
                rest[here] = core.convolution * rows + core.backward * (batch.only + batch.last)
                rest[here] += core.forward * batch.inner
                before[here] = folding + core.backward * (batch.first + batch.inner)
                before[here] += (core.convolution + core.convolution_backward) * rows
            halo.append((stage, batch.halo, what.channels * VALUE))
            states.append((stage, summaries.states, counts * what.state_bytes))
            states.append((stage, summaries.transitions, counts * what.transition_bytes))
        if direction == "forward":
            return CoreNanoBatch(before, rest, self._exchange(halo), self._exchange(states))
        return CoreNanoBatch(before, rest, self._exchange(states), self._exchange(halo, back=True))

    def _exchange(self, parts: Sequence[tuple[int, PairRows, float]], back: bool = False) -> Exchange:
        """Returns an exchange inside stages.

        ``parts`` are a stage, its pairs of rows between ranks, and the bytes of such a row. With ``back`` rows go the
        other way."""
        ranks, servers = self._job.data_parallel, self._job.servers
        home = np.concatenate([stage * ranks + pairs.home for stage, pairs, _ in parts])
        reader = np.concatenate([stage * ranks + pairs.server for stage, pairs, _ in parts])
        size = np.concatenate([pairs.rows * each for _, pairs, each in parts])
        pairs, number = np.unique(home * servers + reader, return_inverse=True)
        home, reader = np.divmod(pairs, servers)
        size = np.bincount(number, size, len(pairs))
        return self._job.fabric.exchange(*((reader, home) if back else (home, reader)), size)
