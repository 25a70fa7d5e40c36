"""The links between servers, and the time that an exchange of rows takes on them.

A server stands for ``tp`` tensor-parallel GPUs. They do the same at the same time, each on its own links, so one of
them is simulated. Servers are called ranks here. Array legend: R ranks, P pairs of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.simulate.cluster import Cluster


@dataclass(frozen=True)
class Fabric:
    """Links between servers.

    Attributes:
        ranks: number of servers.
        per_node: number of servers of a node; servers of a node follow each other.
        nvlink: bytes/s of a GPU inside a node, each way.
        network: bytes/s of a GPU between nodes, each way.
        nvlink_latency: seconds from a launch to the first byte inside a node.
        network_latency: seconds from a launch to the first byte between nodes.
        slow: number of last servers whose nodes have a slower network.
        slow_network: bytes/s of a GPU in that network.
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
        """Returns the links of a cluster between servers of ``tp`` GPUs each."""
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
        """Returns a rank's bytes per second and the latency of a collective.

        Across nodes a collective uses the network links of all its ranks on a node.

        Args:
            size: number of ranks in the collective.
            stride: difference between the numbers of two neighbouring ranks.
        """
        here = min(size, max(self.per_node // stride, 1))
        nvlink, network = self.nvlink_collective or self.nvlink, self.network_collective or self.network
        if size <= here:
            return nvlink, self.nvlink_latency
        return min(nvlink, here * network), self.network_latency

    def everyone(self, degree: int, size: np.ndarray) -> Exchange:
        """Returns an exchange in which each rank sends ``size`` [R] bytes to every other rank of its group.

        A group has ``degree`` consecutive ranks."""
        source = np.repeat(np.arange(self.ranks), degree)
        target = source // degree * degree + np.tile(np.arange(degree), self.ranks)
        return self.exchange(source, target, size[source])

    def exchange(self, source: np.ndarray, target: np.ndarray, size: np.ndarray) -> Exchange:
        """Returns the exchange in which rank ``source`` [P] sends ``size`` [P] bytes to rank ``target`` [P].

        Pairs may repeat and come in any order."""
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
            # NVLink and the network carry rows at the same time, so the longer time counts.
            outgoing = np.maximum(outgoing, np.bincount(source[kind], seconds, self.ranks))
            incoming = np.maximum(incoming, np.bincount(target[kind], seconds, self.ranks))
        # The number of messages of this pair's sender on the same kind of link.
        others = np.maximum(
            np.where(far, np.bincount(source[far], minlength=self.ranks)[source], 0),
            np.where(far, 0, np.bincount(source[~far], minlength=self.ranks)[source]),
        )
        latency = np.where(far, self.network_latency, self.nvlink_latency)
        # A rank's messages share its link evenly, so that a small one arrives before the large ones.
        carried = latency + np.minimum(size / rate * others, outgoing[source])
        heads = np.flatnonzero(np.append(True, target[1:] != target[:-1])[: len(target)])
        return Exchange(
            source, target, size, carried, heads, target[heads], outgoing, incoming, latency, bool(len(source))
        )


@dataclass(frozen=True)
class Exchange:
    """Messages between pairs of ranks that are launched together. Array legend: H ranks that receive some.

    Attributes:
        source: [P] sender of a pair; pairs are sorted by ``target``.
        target: [P] receiver of a pair.
        size: [P] bytes of the pair's message.
        carried: [P] seconds from a message's start to its end on its sender's link.
        heads: [H] number of each receiver's first pair.
        receivers: [H] the receivers.
        outgoing: [R] seconds that a rank's messages occupy its links on their way out.
        incoming: [R] seconds that the messages to a rank occupy its links.
        latency: [P] seconds from a message's launch to its first byte.
        travels: whether there is any message.
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
