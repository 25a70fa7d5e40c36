"""Plans for many servers on a network, beside those of another checkout; writes results/planner_network.json.

    OMP_NUM_THREADS=1 python benchmarks/planner_network.py --beside ../checkout-of-2026-11-22

Every case is planned in two nano-batches for nodes of 8 servers with 128K tokens each, in a process per checkout. One
ruler here judges both:

- slowest over mean, the worst of both nano-batches and directions;
- KB per token that travel in forward (16 per query row with its o, 4 per k,v row), and the same between nodes. Where
  the checkout's routes have two hops, k,v rows go to each node once;
- the busiest server's larger direction, with what it hands on, of both nano-batches together: in KB per token and over
  the mean, and the same between nodes;
- k,v rows that the fullest server keeps, of both nano-batches together: over a rank's tokens, over the mean and over
  the longest task's. Likewise those of them that came from others, and those that a nano-batch's tasks read there;
- the part of a server's transfers that the other nano-batch's layer of 8B does not hide, over the layer's time; links
  have 50 GB/s between nodes and 360 inside;
- CPU milliseconds (``time.process_time``) of layout and plan, one rank's routes, and the metrics of the log, the least
  of two runs.

Costs are those of the analytic model. Nothing runs on GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from distca.data.mixes import sample_mix
from distca.plan import Links, analytic_cost, imbalance, plan_micro_batch, route, server_seconds

TOKENS, NODE = 131_072, 8
COST = analytic_cost(32, 8, 128)
NETWORK, NVLINK = 50e9, 360e9
"""Bytes per second and direction of a server's links, between nodes and inside."""
HOPS = hasattr(Links, "may_relay")
"""Whether routes of this checkout have two hops."""
LINEAR = np.array([2 / 718e12, 4 / 686e12]) * (4096 * 128 * 80 + 3 * 4096 * 14336)
"""Seconds per token of a layer of 8B's matrix products, forward and backward, as ``analytic_cost`` has them."""
SERVERS = (8, 64, 256, 512)
MIXES = (
    ("pretrain", None),
    ("prolong", None),
    ("pretrain-long", 131_072),
    ("prolong-long", 131_072),
    ("pretrain-long", 524_288),
    ("prolong-long", 524_288),
    ("pretrain-long", 1_048_576),
    ("prolong-long", 1_048_576),
)
RESULTS = Path(__file__).parent / "results" / "planner_network.json"


def travelling(plan: Any) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """(home rank, server, rows, number of the home shard) of all query rows that travel, and of all k,v rows; by any
    checkout's plan."""
    tasks, layout = plan.tasks, plan.layout
    last = np.append((tasks.document[1:] != tasks.document[:-1]) | (tasks.server[1:] != tasks.server[:-1]), True)
    last = last[: len(tasks.document)]
    # Rows that servers have from the nano-batch before do not travel.
    begin = plan.contexts.begin if hasattr(plan, "contexts") else 0 * tasks.stop[last]
    found = []
    for ranges, shards in (
        ((tasks.document, tasks.start, tasks.stop, tasks.server), layout.q),
        ((tasks.document[last], begin, tasks.stop[last], tasks.server[last]), layout.kv),
    ):
        document, start, stop, server = ranges
        span = int(max(stop.max(initial=0), shards.stop.max(initial=0))) + 1
        low = np.searchsorted(shards.document * span + shards.stop, document * span + start, side="right")
        high = np.searchsorted(shards.document * span + shards.start, document * span + stop, side="left")
        count = np.maximum(high - low, 0)
        at = np.repeat(np.arange(len(document)), count)
        shard = np.arange(len(at)) - (np.cumsum(count) - count)[at] + low[at]
        rows = np.minimum(stop[at], shards.stop[shard]) - np.maximum(start[at], shards.start[shard])
        home, away = shards.rank[shard], shards.rank[shard] != server[at]
        found.append((home[away], server[at][away], rows[away], shard[away]))
    return found


def kept_rows(plan: Any) -> np.ndarray:
    """[R] k,v rows that servers keep of a half; older checkouts keep a region per task."""
    import distca.plan

    if hasattr(distca.plan, "context_rows"):
        return np.asarray(distca.plan.context_rows(plan)[0])
    return np.bincount(plan.tasks.server, plan.tasks.stop, plan.layout.ranks)


def exposed(attention: list[np.ndarray], travel: list[np.ndarray]) -> float:
    """Part of a layer's time, forward and backward, that the slowest rank waits for transfers.

    Args:
        attention: by half, [2] seconds of the slowest server, forward and backward.
        travel: by half, [R] seconds of transfers; backward's are as many.
    """
    compute = [each + LINEAR * TOKENS / 2 for each in attention]
    waits = [np.maximum(own.max() - other, 0).sum() for own, other in zip(travel, compute[::-1], strict=True)]
    return float(sum(waits) / (sum(waits) + np.sum(compute)))


def in_hops(home: np.ndarray, server: np.ndarray, rows: np.ndarray, shard: np.ndarray) -> tuple[np.ndarray, ...]:
    """[P] ranks that send k,v ``rows``, their servers, and the rows, where each node gets a shard's once: readers need
    its first rows, so the longest of a node's has all of its others', which get them from there."""
    nodes = int(server.max(initial=0)) // NODE + 1
    far, key = home // NODE != server // NODE, shard * nodes + server // NODE
    # In the routes' order, so that loads of single ranks are theirs too.
    order = np.lexsort(((server - home) % NODE, -rows, key))
    first = np.append(True, key[order][1:] != key[order][:-1])[: len(order)]
    via = np.empty_like(order)
    via[order] = order[np.flatnonzero(first)[np.cumsum(first) - 1]]
    return np.where(far & (via != np.arange(len(via))), server[via], home), server, rows


def judged(made: Any, servers: int) -> dict[str, float]:
    """The figures that a plan achieves."""
    total, busiest, worst = 0.0, np.zeros((2, servers)), 1.0
    received = np.zeros(servers)
    between = 0.0
    attention, travel = [], []
    for nano in made.nano_batches:
        nano.forward.check()
        q, kv = travelling(nano.forward)
        received += np.bincount(kv[1], kv[2], servers)
        loads = np.zeros((2, 2, servers))  # inside and between nodes; out and in
        for (home, server, rows), (there, back) in (q[:3], (8, 8)), (in_hops(*kv) if HOPS else kv[:3], (4, 0)):
            far = home // NODE != server // NODE
            for kind, some in enumerate((~far, far)):
                for way, (ends, other) in enumerate(((home, server), (server, home))):
                    loads[kind, way] += np.bincount(ends[some], rows[some] * there, servers)
                    loads[kind, way] += np.bincount(other[some], rows[some] * back, servers)
        total += float(loads[:, 0].sum())
        between += float(loads[1, 0].sum())
        busiest += loads.sum(axis=0).max(axis=0), loads[1].max(axis=0)
        travel.append(1024 * (loads[0].max(axis=0) / NVLINK + loads[1].max(axis=0) / NETWORK))
        attention.append(np.array([server_seconds(nano.forward, COST, way).max() for way in ("forward", "backward")]))
        worst = max(worst, *(imbalance(server_seconds(nano.forward, COST, way)) for way in ("forward", "backward")))
    tokens = servers * TOKENS
    plans = [nano.forward for nano in made.nano_batches]
    kept = np.sum([kept_rows(plan) for plan in plans], axis=0)
    read = max(int(np.bincount(plan.tasks.server, plan.tasks.stop).max()) for plan in plans)
    longest = max(int(plan.tasks.stop.max()) for plan in plans)
    return {
        "slowest_over_mean": worst,
        "kb_per_token": total / tokens,
        "kb_per_token_between_nodes": between / tokens,
        "busiest_kb_per_token": float(busiest[0].max()) / TOKENS,
        "busiest_over_mean": imbalance(busiest[0]),
        "busiest_kb_per_token_between_nodes": float(busiest[1].max()) / TOKENS,
        "kept_kv": float(kept.max()) / TOKENS,
        "kept_kv_over_mean": imbalance(kept),
        "kept_kv_over_longest_task": float(kept.max()) / longest,
        "received_kv": float(received.max()) / TOKENS,
        "received_kv_over_mean": imbalance(received),
        "received_kv_over_longest_task": float(received.max()) / longest,
        "read_kv": read / TOKENS,
        "exposed": exposed(attention, travel),
    }


def measured(mix: str, context: int | None, servers: int, seed: int) -> dict[str, float]:
    """One case: what is achieved, and what it takes."""
    lengths = sample_mix(mix, servers * TOKENS, seed, context=context)
    took = []
    for _ in range(2):
        times = [time.process_time()]
        made = plan_micro_batch(lengths, servers, COST, nano_batches=2, links=Links(NODE))
        times.append(time.process_time())
        for nano in made.nano_batches:
            route(nano.forward, servers // 2, *([Links(NODE)] if HOPS else []))
        times.append(time.process_time())
        _ = made.bytes_moved, made.seconds_after, made.seconds_before
        times.append(time.process_time())
        took.append(np.diff(times) * 1e3)
    plan_ms, route_ms, metrics_ms = np.min(took, axis=0).tolist()
    return {
        **judged(made, servers),
        "plan_ms": plan_ms,
        "route_ms": route_ms,
        "metrics_ms": metrics_ms,
        "all_ms": plan_ms + route_ms + metrics_ms,
    }


def summary(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median and worst of every figure."""
    return {
        key: {
            "median": round(statistics.median(row[key] for row in rows), 4),
            "max": round(max(row[key] for row in rows), 4),
        }
        for key in rows[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", help="root of another checkout to run in the same process order")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--servers", type=int, nargs="+", default=SERVERS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        mix, context, servers, seeds = json.loads(options.case)
        rows = [measured(mix, context, servers, seed) for seed in range(seeds)]
        sys.stdout.write(json.dumps(summary(rows)))
        return
    trees = {"here": str(Path(__file__).parent.parent)} | ({"beside": options.beside} if options.beside else {})
    cases: dict[str, dict[str, Any]] = {}
    results = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/planner_network.py --beside CHECKOUT"
        f" --seeds {options.seeds} --servers {' '.join(map(str, options.servers))}",
        "beside": "the commit of 2026-11-22" if options.beside else None,
        "versions": {"python": sys.version.split()[0], "numpy": np.__version__},
        "seeds": options.seeds,
        "servers_per_node": NODE,
        "cases": cases,
    }
    for servers, (mix, context) in product(options.servers, MIXES):
        name = f"{mix} {servers}" + (f", context {context // 1024}K" if context else "")
        cases[name] = {}
        for tree, root in trees.items():
            command = [sys.executable, __file__, "--case", json.dumps([mix, context, servers, options.seeds])]
            ran = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=True
            )
            cases[name][tree] = json.loads(ran.stdout)
        shown = (
            "slowest_over_mean",
            "kb_per_token",
            "busiest_over_mean",
            "kb_per_token_between_nodes",
            "kept_kv",
            "kept_kv_over_mean",
            "exposed",
            "all_ms",
        )
        parts = [" ".join(f"{found[key]['median']:.3f}" for key in shown) for found in cases[name].values()]
        print(f"{name}: {' | '.join(parts)}", flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
