"""Two hops: key and value rows cross the network once per node and go on inside it.

Readers of a home shard need its first rows, up to their tasks' ends. So the reader of a node that needs most of them,
its *gateway*, gets all that the others there need into its own buffer, and they get them from there. Among readers that
need as many it is the one with the home rank's number inside the node, or the next behind it: that spreads the relays
over readers as homes are spread, and rows keep to links between ranks of one number.
"""

from __future__ import annotations

import numpy as np

from distca.plan.scheduler.network_cost import Links
from distca.plan.sorting import order_by


def gateways(
    home: np.ndarray, server: np.ndarray, rows: np.ndarray, shard: np.ndarray, links: Links | None, ranks: int
) -> np.ndarray:
    """[N] int64: for each of N pieces, the piece whose server hands the rows on; itself where they come from home.

    Args:
        home: [N] rank that the rows live on.
        server: [N] rank that reads them; no two pieces have both shard and server in common.
        rows: [N] how many of the shard's first rows.
        shard: [N] number of the home shard.
        links: which ranks share a node; None for all.
        ranks: R.
    """
    via = np.arange(len(home))
    if links is None or not links.may_relay(ranks):
        return via
    node, local = links.nodes(ranks), np.arange(ranks) % links.ranks_per_node
    far = np.flatnonzero(node[home] != node[server])
    if not len(far):
        return via
    home, server, rows = home[far], server[far], rows[far]
    group = shard[far] * (int(node[-1]) + 1) + node[server]
    turn = (local[server] - local[home]) % links.ranks_per_node
    order = order_by(group, rows.max() - rows, turn)
    group = group[order]
    heads = np.append(True, group[1:] != group[:-1])
    via[far[order]] = far[order[np.flatnonzero(heads)[np.cumsum(heads) - 1]]]
    return via
