"""Links of the server pool: what an exchange of rows takes on every rank.

A rank is a server: one tensor-parallel rank of each, which all do the same at the same time on links of their own.
Array legend: R ranks, P pairs of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.simulate.cluster import Cluster


@dataclass(frozen=True)
class Fabric:
    """Links between servers.

    Attributes:
        ranks: servers.
        per_node: consecutive servers of a node.
        nvlink: bytes/s of a GPU inside a node, each way.
        network: bytes/s of a GPU between nodes, each way.
        nvlink_latency: seconds until the first byte.
        network_latency: the same between nodes.
        slow: the last servers, on nodes with a network of their own.
        slow_network: bytes/s of a GPU there.
        nvlink_collective: bytes/s of a GPU in collectives inside a node; 0 for ``nvlink``.
        network_collective: the same between nodes; 0 for ``network``.
    """

    ranks: int
    per_node: int
    nvlink: float
    network: float
    nvlink_latency: float = 0.0
    network_latency: float = 0.0
    slow: int = 0
    slow_network: float = 0.0
    nvlink_collective: float = 0.0
    network_collective: float = 0.0

    @staticmethod
    def of(cluster: Cluster, tp: int) -> Fabric:
        """Servers of ``tp`` GPUs each."""
        return Fabric(
            cluster.gpus // tp,
            max(min(cluster.gpus_per_node, cluster.gpus) // tp, 1),
            cluster.nvlink_gb_s * 1e9,
            cluster.network_gb_s * 1e9,
            cluster.nvlink_latency_us * 1e-6,
            cluster.network_latency_us * 1e-6,
            cluster.slow_gpus // tp,
            cluster.slow_network_gb_s * 1e9,
            cluster.nvlink_collective_gb_s * 1e9,
            cluster.network_collective_gb_s * 1e9,
        )

    @property
    def one_node(self) -> bool:
        """Whether no row crosses a network."""
        return self.ranks <= self.per_node

    @property
    def node(self) -> np.ndarray:
        """[R] node of every rank."""
        return np.arange(self.ranks) // self.per_node

    def ring(self, size: int, stride: int = 1) -> tuple[float, float]:
        """Bytes/s of a rank and latency of a collective over ``size`` ranks that are ``stride`` apart. Across nodes a
        collective uses the network link of every rank it has there."""
        here = min(size, max(self.per_node // stride, 1))
        nvlink, network = self.nvlink_collective or self.nvlink, self.network_collective or self.network
        if size <= here:
            return nvlink, self.nvlink_latency
        return min(nvlink, here * network), self.network_latency

    def everyone(self, degree: int, size: np.ndarray) -> Exchange:
        """Every rank sends ``size`` [R] bytes to each other one of its group of ``degree`` consecutive ranks."""
        source = np.repeat(np.arange(self.ranks), degree)
        target = source // degree * degree + np.tile(np.arange(degree), self.ranks)
        return self.exchange(source, target, size[source])

    def exchange(self, source: np.ndarray, target: np.ndarray, size: np.ndarray) -> Exchange:
        """An exchange of ``size`` [P] bytes between pairs of ranks; pairs may repeat and come in any order."""
        some = np.flatnonzero((size > 0) & (source != target))
        order = some[np.argsort(target[some], kind="stable")]
        source, target, size = source[order], target[order], np.asarray(size, np.float64)[order]
        far = self.node[source] != self.node[target]
        outgoing, incoming = np.zeros(self.ranks), np.zeros(self.ranks)
        slow = np.maximum(source, target) >= self.ranks - self.slow
        network = np.where(slow, min(self.network, self.slow_network), self.network) if self.slow else self.network
        rate = np.where(far, network, self.nvlink)
        for kind in (far, ~far):
            seconds = size[kind] / rate[kind]
            # Links of both kinds carry at the same time.
            outgoing = np.maximum(outgoing, np.bincount(source[kind], seconds, self.ranks))
            incoming = np.maximum(incoming, np.bincount(target[kind], seconds, self.ranks))
        others = np.maximum(
            np.where(far, np.bincount(source[far], minlength=self.ranks)[source], 0),
            np.where(far, 0, np.bincount(source[~far], minlength=self.ranks)[source]),
        )
        latency = np.where(far, self.network_latency, self.nvlink_latency)
        # A rank's messages share its link fairly: a small one is there before the large ones.
        carried = latency + np.minimum(size / rate * others, outgoing[source])
        heads = np.flatnonzero(np.append(True, target[1:] != target[:-1])[: len(target)])
        return Exchange(
            source, target, size, carried, heads, target[heads], outgoing, incoming, latency, bool(len(source))
        )


@dataclass(frozen=True)
class Exchange:
    """Rows that move between ranks at once. Array legend: H ranks that receive.

    Attributes:
        source: [P] rank that sends, sorted by ``target``.
        target: [P] rank that receives.
        size: [P] bytes.
        carried: [P] seconds from a message's start to its end on its sender's link.
        heads: [H] first pair of every receiver.
        receivers: [H] those ranks.
        outgoing: [R] seconds of all that a rank sends.
        incoming: [R] seconds of all that it receives.
        latency: [P] seconds.
        travels: whether anything moves.
    """

    source: np.ndarray
    target: np.ndarray
    size: np.ndarray
    carried: np.ndarray
    heads: np.ndarray
    receivers: np.ndarray
    outgoing: np.ndarray
    incoming: np.ndarray
    latency: np.ndarray
    travels: bool
