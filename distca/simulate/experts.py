"""Layers with experts: rows go to the ranks that have them and come back, as if every expert got equally many.

Array legend: R servers. A server is ``tp`` GPUs, of which each sends its share of the rows; expert-parallel ranks are
consecutive GPUs of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from distca.simulate.job import VALUE, WIDE, Job
from distca.simulate.streams import Arrival, Streams


class ExpertLayers:
    """Queues what layers with experts do behind the output projection.

    Args:
        job: what runs.
        streams: of the servers.
        stages: [R] the stage of every server.
        hidden: exchanges are waited for nowhere, as far as they are shorter than what lies beside.
    """

    def __init__(self, job: Job, streams: Streams, stages: np.ndarray, hidden: bool = False) -> None:
        self._job, self._streams, self._late = job, streams, hidden
        first = stages * job.layers
        mixes = np.array([kind.mlp.experts.count > 0 for kind in job.model.layer_kinds])
        # [layers of a stage, R]
        self._mixes = np.stack([mixes[first + layer] for layer in range(job.layers)])
        self._group = job.servers_of_experts

    def __contains__(self, layer: int) -> bool:
        """Whether the ``layer``-th of any stage has experts."""
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
        """Queue the experts of a layer.

        Args:
            rows: [R] home rows of each nano-batch.
            order: of the nano-batches.
            layer: of the stage.
            direction: forward or backward.
            before: queues what a nano-batch computes before its rows are sent.
            behind: queues what it does when they are back.

        Returns:
            Exchanges that the caller has yet to wait for.
        """
        if not self._job.hide_experts:
            arrivals = []
            for nano in order:
                arrivals += self._half(rows[nano], nano, layer, direction, before, behind)
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

    def _half(
        self,
        rows: np.ndarray,
        nano: int,
        layer: int,
        direction: str,
        before: Callable[[int], None],
        behind: Callable[[int], None],
    ) -> list[Arrival]:
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
        """Put rows together and send them; experts that are computed again get them twice."""
        rows = rows * self._mixes[layer]
        times = self._times(direction)
        self._streams.compute(times * self._copies(what, rows), f"rows {what}", layer, nano, direction)
        most = np.repeat(rows.reshape(-1, self._group).max(axis=1), self._group)
        seconds, _ = exchange_of_experts(self._job, most)
        return self._streams.all_to_all(times * seconds, self._group, f"rows {what}", layer, nano)

    def _compute(self, rows: np.ndarray, nano: int, layer: int, direction: str) -> None:
        each = self._job.rows[layer]
        rows = rows * self._mixes[layer]
        mean = np.repeat(rows.reshape(-1, self._group).mean(axis=1), self._group)
        seconds = mean * (each.experts_forward if direction == "forward" else each.experts_backward)
        copies = self._times(direction) * self._copies("experts", mean)
        self._streams.compute(seconds + copies, "experts", layer, nano, direction)
        weights = 2 * self._job.model.experts.count / self._job.ep
        self._streams.stall(np.where(rows > 0, weights * self._job.rates.expert_weight_s / 2, 0.0))

    def _times(self, direction: str) -> int:
        return 2 if direction == "backward" and self._job.recompute != "none" else 1

    def _copies(self, what: str, rows: np.ndarray) -> np.ndarray:
        """[R] seconds: of a copy for each rank that a row goes to, of one for each of its experts, and of sums."""
        job, experts = self._job, self._job.model.experts
        there = job.ep * experts.copies_at_each(job.ep)
        # A sum reads all and writes little, which is half a copy.
        exchanged = {"there": there, "back": there / 2} if job.ep > 1 else {}
        times = exchanged.get(what, 0.0) if what != "experts" else 1.5 * experts.topk + there / 2
        return job.copied(times * rows * job.model.hidden * VALUE / job.tp)


def exchange_of_experts(job: Job, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and bytes of a GPU that sends a server's ``rows`` [R] to experts, or gets them back from there.

    Each row travels once to every rank with one of its experts."""
    experts, ep, cluster = job.model.experts, job.ep, job.cluster
    near_ranks = min(ep, cluster.gpus_per_node)
    nodes = -(-ep // cluster.gpus_per_node)
    row = rows / job.tp * (job.model.hidden * VALUE + WIDE * experts.topk)  # with its scores
    each = row * experts.copies_at_each(ep)
    near, far = each * (near_ranks - 1), each * (ep - near_ranks)
    sent = near + far
    if job.once_per_node and nodes > 1:
        # Once to each other node that has an expert of the row, where it is handed on.
        near, far = near + far, row * (nodes - 1) * (1 - (1 - 1 / nodes) ** experts.topk)
        sent = near + far
    latency = cluster.network_latency_us if nodes > 1 else cluster.nvlink_latency_us
    seconds = np.maximum(near / (cluster.nvlink_gb_s * 1e9), far / (cluster.network_gb_s * 1e9))
    return np.where(rows * (ep > 1) > 0, seconds + latency * 1e-6, 0.0), sent * (ep > 1)
