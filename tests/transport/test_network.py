"""Two nodes of two ranks with a network between them: what keys and values send over it, in one hop and in two."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distca.plan import AttentionKind, Links, Plan, Tasks, lay_out, route
from distca.runtime.device_routes import ServerRoute
from distca.testing.nodes import why_not
from distca.transport import Part
from distca.transport.collective import CollectiveTransport
from tests.testing.forked_nodes import ForkedNodes

KINDS = [AttentionKind(1.0)]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=f"no nodes: {why_not()}")]
ROOT = Path(__file__).parents[2]
ROWS, WIDTH = 1000, 256  # rows of a KiB


def sent() -> int:
    """Bytes that this node's sockets sent to the other one so far.

    The kernel's count per socket leaves out what it sends again, which a busy machine makes it do now and then.
    """
    listed = subprocess.run(["ss", "-tinOH"], check=True, capture_output=True, text=True).stdout
    total = 0
    for line in listed.splitlines():
        mine, theirs = (address.rpartition(":")[0] for address in line.split()[3:5])
        if mine != theirs:  # not of two ranks of one node
            figures = dict(re.findall(r"\b(bytes_sent|bytes_retrans):(\d+)", line))
            total += int(figures.get("bytes_sent", 0)) - int(figures.get("bytes_retrans", 0))
    return total


def node_main() -> None:
    """Both ranks of a node, of which the second one is forked: imports take longer than all that follows."""
    child = os.fork()
    if child == 0:
        os.environ["RANK"] = str(int(os.environ["RANK"]) + 1)
    found = rank_main()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    sys.stdout.write(json.dumps(found))


def rank_main() -> list[float]:
    """One rank: KiB that its node sent, forward without nodes and with them, then backward."""
    dist.init_process_group("gloo")
    rank, transport, found = dist.get_rank(), CollectiveTransport(dist.group.WORLD), []
    stops = np.arange(1, 5) * ROWS  # every rank has a quarter of one document, and serves it
    plan = Plan(lay_out([4 * ROWS], 4)[0], Tasks.sorted(np.zeros(4, int), stops - ROWS, stops, np.arange(4)))
    routes = [ServerRoute.of(route(plan, rank, links), KINDS, "cpu") for links in (None, Links(2))]
    for name in ("kv_to_server", "kv_to_home"):
        for moves in (getattr(each, name) for each in routes):
            part = Part(torch.ones(moves.source_rows, WIDTH), torch.zeros(moves.destination_rows, WIDTH), moves)
            dist.barrier()
            before = sent()
            dist.barrier()  # nobody sends before all have read
            transport.launch((part,)).wait()
            dist.barrier()  # all was received, and so it was sent
            found.append((sent() - before) / 1024)
            dist.barrier()  # and nobody goes on before all have read
    return found


def test_keys_and_values_and_their_gradients_cross_a_network_once_per_node(tmp_path: Path) -> None:
    start = "from tests.transport.test_network import node_main; node_main()"
    with ForkedNodes(2) as nodes:
        where = {"WORLD_SIZE": "4", "MASTER_ADDR": nodes.address(0), "MASTER_PORT": "29511", "PYTHONPATH": str(ROOT)}
        started = []
        for node in range(2):
            with (tmp_path / str(node)).open("w") as found:
                where["RANK"] = str(2 * node)
                started.append(nodes.start(node, [sys.executable, "-c", start], where, stdout=found))
        assert [rank.wait(100) for rank in started] == [0, 0]
        first, second = (json.loads((tmp_path / str(node)).read_text()) for node in range(2))
    # The first node's 2,000 rows have two readers on the second; nothing else crosses, but for headers and barriers.
    direct, hops, *nothing = first
    assert direct == pytest.approx(2 * 2000, rel=0.1) and hops == pytest.approx(2000, rel=0.1)
    assert max(nothing) < 200 and max(second[:2]) < 200
    assert second[2:] == pytest.approx([2 * 2000, 2000], rel=0.1)
