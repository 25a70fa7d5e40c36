"""Simulates experts in a layer: rows go to the ranks with their experts, are computed and come back.

Every expert is supposed to get equally many rows. Array legend: R servers, the first H of which are homes. A server
stands for ``tp`` GPUs, each of which sends its part of the rows. Expert-parallel ranks are consecutive GPUs of a
pipeline stage. Servers without a model have no experts, and do nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from distca.simulate.job import VALUE, WIDE, Job
from distca.simulate.streams import Arrival, Streams


class ExpertLayers:
    """Runs the experts of layers on simulated streams.

    Args:
        job: the model, the cluster and the parallelism.
        streams: the streams of the servers.
        stages: [H] the pipeline stage of each home.
        hidden: True leaves it to the caller to wait for the exchanges, at a later place.
    """

    def __init__(self, job: Job, streams: Streams, stages: np.ndarray, hidden: bool = False) -> None:
        self._job, self._streams, self._late = job, streams, hidden
        self._homes = len(stages)
        first = stages * job.layers
        mixes = np.array([kind.mlp.experts.count > 0 for kind in job.model.layer_kinds])
        # [layers of a stage, H] whether the layer has experts
        self._mixes = np.stack([mixes[first + layer] for layer in range(job.layers)])
        self._group = job.servers_of_experts

    def __contains__(self, layer: int) -> bool:
        """Whether layer number ``layer`` of any stage has experts."""
        return bool(self._mixes[layer].any())

    def run(
        self,
        rows: Sequence[np.ndarray],
        order: Sequence[int],
        layer: int,
        direction: str,
        before: Callable[[int], None],
        behind: Callable[[int], None],
    ) -> list[Arrival]:
        """Runs the experts of a layer for all nano-batches.

        Args:
            rows: for each nano-batch [R] its home rows.
            order: the numbers of the nano-batches in the order in which they run.
            layer: number of the layer in its stage.
            direction: "forward" or "backward".
            before: a function that runs a nano-batch's computation before its rows are sent.
            behind: a function that runs its computation after they have come back.

        Returns:
            The exchanges for which the caller has to wait.
        """
        rows = [each[: self._homes] for each in rows]
        if not self._job.hide_experts:
            arrivals = []
            for nano in order:
                arrivals += self._nano_batch(rows[nano], nano, layer, direction, before, behind)
            return arrivals
        there, back = {}, {}
        for nano in order:
            before(nano)
            there[nano] = self._send("there", rows[nano], nano, layer, direction)
        for nano in order:
            self._streams.join(there[nano], layer, nano, direction)
            self._compute(rows[nano], nano, layer, direction)
            back[nano] = self._send("back", rows[nano], nano, layer, direction)
        for nano in order:
            self._streams.join(back[nano], layer, nano, direction)
            behind(nano)
        return []

    def _nano_batch(
        self,
        rows: np.ndarray,
        nano: int,
        layer: int,
        direction: str,
        before: Callable[[int], None],
        behind: Callable[[int], None],
    ) -> list[Arrival]:
        """Runs the experts of one nano-batch, without another one's computation beside its exchanges."""
        before(nano)
        there = self._send("there", rows, nano, layer, direction)
        if not self._late:
            self._streams.join(there, layer, nano, direction)
        self._compute(rows, nano, layer, direction)
        back = self._send("back", rows, nano, layer, direction)
        if not self._late:
            self._streams.join(back, layer, nano, direction)
        behind(nano)
        return [there, back] if self._late else []

    def _send(self, what: str, rows: np.ndarray, nano: int, layer: int, direction: str) -> Arrival:
        """Copies rows and starts their exchange. Experts that backward recomputes get rows twice."""
        rows = rows * self._mixes[layer]
        times = self._times(direction)
        self._compute_at_home(times * self._copies(what, rows), f"rows {what}", layer, nano, direction)
        most = np.repeat(rows.reshape(-1, self._group).max(axis=1), self._group)
        seconds, _ = exchange_of_experts(self._job, most)
        return self._streams.all_to_all(times * seconds, self._group, f"rows {what}", layer, nano)

    def _compute(self, rows: np.ndarray, nano: int, layer: int, direction: str) -> None:
        """Adds the experts' computation, and the time in which GPUs wait for the host to launch its kernels."""
        each = self._job.rows[layer]
        rows = rows * self._mixes[layer]
        mean = np.repeat(rows.reshape(-1, self._group).mean(axis=1), self._group)
        seconds = mean * (each.experts_forward if direction == "forward" else each.experts_backward)
        copies = self._times(direction) * self._copies("experts", mean)
        self._compute_at_home(seconds + copies, "experts", layer, nano, direction)
        self._streams.stall(self._with_servers(np.where(rows > 0, self._job.rates.expert_layer_s / 2, 0.0)))

    def _compute_at_home(self, seconds: np.ndarray, name: str, layer: int, nano: int, direction: str) -> None:
        self._streams.compute(self._with_servers(seconds), name, layer, nano, direction)

    def _with_servers(self, seconds: np.ndarray) -> np.ndarray:
        """Returns [R] ``seconds`` [H], and 0 for servers without a model."""
        return np.append(seconds, np.zeros(len(self._streams.now) - self._homes))

    def _times(self, direction: str) -> int:
        """Returns how many times rows are sent: twice in backward with recomputation, once else."""
        return 2 if direction == "backward" and self._job.recompute != "none" else 1

    def _copies(self, what: str, rows: np.ndarray) -> np.ndarray:
        """Returns [R] seconds of copies: one for each rank and each expert to which a row goes, and of sums."""
        job, experts = self._job, self._job.model.experts
        there = job.ep * experts.copies_at_each(job.ep)
        # A sum reads several rows and writes one, so it takes about half of a copy.
        exchanged = {"there": there, "back": there / 2} if job.ep > 1 else {}
        times = exchanged.get(what, 0.0) if what != "experts" else 1.5 * experts.topk + there / 2
        return job.copied(times * job.residual_bytes(rows))


def exchange_of_experts(job: Job, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns [R] seconds and [R] bytes of a GPU for the exchange of a server's ``rows`` [R] with experts, one way.

    Each row travels once to every rank that has one of its experts."""
    experts, ep, cluster = job.model.experts, job.ep, job.cluster
    near_ranks = min(ep, cluster.gpus_per_node)
    nodes = -(-ep // cluster.gpus_per_node)
    row = rows / job.tp * (job.model.hidden * VALUE + WIDE * experts.topk)  # with its scores
    each = row * experts.copies_at_each(ep)
    near, far = each * (near_ranks - 1), each * (ep - near_ranks)
    sent = near + far
    if job.once_per_node and nodes > 1:
        # A row travels once to each other node with one of its experts, and is handed on there.
        near, far = near + far, row * (nodes - 1) * (1 - (1 - 1 / nodes) ** experts.topk)
        sent = near + far
    latency = cluster.network_latency_us if nodes > 1 else cluster.nvlink_latency_us
    seconds = np.maximum(near / (cluster.nvlink_gb_s * 1e9), far / (cluster.network_gb_s * 1e9))
    return np.where(rows * (ep > 1) > 0, seconds + latency * 1e-6, 0.0), sent * (ep > 1)
