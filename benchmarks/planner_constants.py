"""The worth of the planner's tuned constants: each with other values, on the same batches; writes a results file.

    OMP_NUM_THREADS=1 python -m benchmarks.planner_constants

Three figures are averaged over all cases: the slowest server over the mean, the bytes that travel, and the CPU time of
planning. The last two are given over those of the constant's own value. All are predicted; nothing runs on GPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distca.data.mixes import sample_mix
from distca.plan import Links, MicroBatchPlan, analytic_cost, imbalance, plan_micro_batch, server_seconds
from distca.plan.cost.pool import at_speeds
from distca.versions import versions, write_report

TOKENS, SEEDS = 131_072, 3
COST = analytic_cost(32, 8, 128)
RESULTS = Path(__file__).parent / "results" / "planner_constants.json"
PLACES: dict[str, dict[str, tuple[Any, ...]]] = {
    "place.bins": {
        "_DENSE": (0.4, 0.8),
        "_SAME_SIZE": (1.2, 3.0),
        "OVERFULL": (0.003, 0.05),
        "_OVERFULL_WITH_KEYS": (0.012, 0.2),
        "_LEVELLINGS": (0, 1, 2, 6),
        "_FEW_SHARES": (0.5, 3.0),
        "LEAST_SHARE": (0.02, 0.1),
        "_LEAST_ROWS": (0.05, 1.0),
    },
    "place.shares": {
        "_SHORT_DOCUMENTS": (0.01, 0.1),
        "ONE_BY_ONE": (64, 8192),
        "_PING": (0.15, 0.4),
        "_LITTLE_PING": (0.02, 0.15),
        "_FEW_SHARED": (0.001, 0.05),
        "_SPARE": (1.0, 1.2),
        "_MOST_ROWS_IN_PONG": (0.2, 0.5),
    },
    "place.head_cuts": {
        "_CLOSE": (0.0005, 0.02),
        "_HALVINGS": (8, 24),
        "_NEARLY": (0.005, 0.08),
        "_LEVELLINGS": (1, 4),
        "_FEW": (0.02, 0.3),
    },
    "place.by_nano_batch": {
        "_DENSE": (0.4, 0.8),
        "_SAME_SIZE": (1.2, 3.0),
        "_SHORT_DOCUMENTS": (0.01, 0.1),
        "_ENOUGH_OVER": (0.001, 0.02),
        "_LEAST_PART": (0.01, 0.2),
        "_PASSES": (1, 6),
        "_CORRECTIONS": (1, 4),
    },
    "place.nano_batches": {"_DEALT_ONE_BY_ONE": (8, 512), "_SHORT_TAIL": (1 / 256, 1 / 8)},
    "choice": {"_WORTH": (0.0, 0.05)},
    "step": {"_WHOLE": (1.01, 1.2)},
    "scheduler.balancer": {
        "_LEAST_ROOM": (1e-6, 1e-3),
        "_TRIES": (1, 8),
        "_FAILED": (8, 512),
        "_FAILED_UNLIKE": (0, 16),
        "_PARTNERS": (2, 32),
        "_CRUMB": (8, 512),
        "_MOST_EXCHANGED": (64, 4096),
        "_KV_SHARE": (0.3, 0.8),
    },
    "scheduler.range_split": {
        "MOST_OVERHEAD": (0.1, 1.0),
        "_PLACES": (5, 49),
        "_LEAST_BLOCKS": (2, 32),
        "_FEW": (2, 32),
        "_LONG_CONTEXT": (16_384, 10**9),
        "_NEVER_WASTEFUL": (8, 128),
        "_SLIVER": (2, 32),
        "_FINEST": (0.001, 0.02),
    },
    "scheduler.scheduler": {
        "_AIM": (0.8, 1.0),
        "_JOININGS": (1, 6),
        "_USUAL_TRIES": (1, 7),
        "_MORE_OVERHEAD": (0.25, 3.0),
        "_LEAST_SLACK": (0.0, 0.003),
    },
    "scheduler.unlike": {"_FINEST": (0.002, 0.02), "_MOST_OVERHEAD": (0.25, 3.0)},
    "scheduler.state": {"_MOST_KEPT": (1.1, 3.0), "_FEW_KEPT": (2, 20)},
}


def plans() -> Iterator[Callable[[], MicroBatchPlan]]:
    """Calls that plan each case: many servers, few, unlike ones, and documents that stay at given homes."""
    cases: list[tuple[str, int | None, int, dict[str, Any]]] = [
        ("pretrain", None, 64, {"links": Links(8)}),
        ("prolong", None, 64, {"links": Links(8)}),
        ("pretrain-long", TOKENS, 64, {"links": Links(8)}),
        ("prolong-long", 4 * TOKENS, 64, {"links": Links(8)}),
        ("pretrain", None, 8, {}),
        ("pretrain-long", TOKENS, 8, {}),
        ("prolong-long", TOKENS, 8, {}),
        ("pretrain", None, 16, {"cost": at_speeds(COST, [1.0] * 8 + [0.5] * 8)}),
        ("pretrain", None, 16, {"at_given_homes": True}),
        ("prolong", None, 16, {"at_given_homes": True}),
    ]
    for mix, context, servers, how in cases:
        for seed in range(SEEDS):
            lengths = sample_mix(mix, servers * TOKENS, seed, context=context)
            yield partial(plan, lengths, servers, **how)


def plan(
    lengths: np.ndarray, servers: int, cost: Any = COST, at_given_homes: bool = False, **how: Any
) -> MicroBatchPlan:
    """One micro-batch in two nano-batches; at given homes, all balancing is the scheduler's."""
    homes = np.arange(len(lengths)) * servers // len(lengths) if at_given_homes else None
    return plan_micro_batch(lengths, servers, cost, nano_batches=2, rank_of=homes, **how)


def judged() -> tuple[float, float, float]:
    """Slowest over mean, bytes per token, and CPU seconds, in the mean over all cases."""
    slowest, moved, seconds = [], [], []
    for planned in plans():
        began = time.process_time()
        made = planned()
        seconds.append(time.process_time() - began)
        cost = made.step.options.server_cost
        ways = [server_seconds(p, cost, way) for nano in made.nano_batches for p, way in nano.directed]
        slowest.append(max(imbalance(each) for each in ways))
        moved.append(made.bytes_moved.total / int(made.lengths.sum()))
    return statistics.mean(slowest), statistics.mean(moved), statistics.mean(seconds)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    judged()  # the first calls are slower
    own = judged()
    found: list[dict[str, Any]] = []
    for place, constants in PLACES.items():
        for name, values in constants.items():
            usual = getattr(sys.modules[f"distca.plan.{place}"], name)
            holders = [
                module
                for key, module in sys.modules.items()
                if key.startswith("distca.plan") and (key.endswith(place) or not name.startswith("_"))
                if getattr(module, name, None) is usual
            ]
            for value in values:
                for module in holders:
                    setattr(module, name, np.linspace(0.0, 1.0, value) if name == "_PLACES" else value)
                slowest, moved, seconds = judged()
                found.append(
                    {
                        "constant": f"{place}.{name}",
                        "usual": len(usual) if name == "_PLACES" else usual,
                        "value": value,
                        "slowest": round(slowest, 4),
                        "bytes": round(moved / own[1], 3),
                        "seconds": round(seconds / own[2], 2),
                    }
                )
                print(json.dumps(found[-1]), flush=True)
            for module in holders:
                setattr(module, name, usual)
    first = {"slowest": round(own[0], 4), "bytes_per_token": round(own[1]), "cpu_ms": round(own[2] * 1e3, 1)}
    report = {"command": "OMP_NUM_THREADS=1 python -m benchmarks.planner_constants", "versions": versions()}
    write_report(RESULTS, report | {"as_it_is": first, "constants": found})


if __name__ == "__main__":
    main()
