"""Plans random steps on equal servers and compares each plan's fingerprint with the kept one: plans that should not
have changed have not.

    OMP_NUM_THREADS=1 python -m benchmarks.planner_same            # compare; the exit status is 1 where one differs
    OMP_NUM_THREADS=1 python -m benchmarks.planner_same --keep     # plans were meant to change: keep the new ones

Steps are those of ``planner_invariants``: pools of up to 64 servers, with and without stages, one and two nano-batches.
For every ten steps results/planner_same.json keeps a fingerprint, and how level the plans are and how many bytes they
move. Plans do not depend on the kind of CPU. Another version of numpy may draw other steps or round a sum otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.planner_invariants import MOST_RANKS, drawn, plan_of
from distca.json_file import read_object
from distca.plan import StepPlan
from distca.versions import versions, write_report

RESULTS = Path(__file__).parent / "results" / "planner_same.json"
STEPS = 300
_TOGETHER = 10
_MOST_DOCUMENTS = 4000
"""Documents of a step at most: one of more takes seconds to plan."""


def plans_of(first: int) -> list[StepPlan]:
    """The plans of ten steps from number ``first`` on, without those that are too large."""
    steps = map(drawn, range(first, first + _TOGETHER))
    return [
        plan_of(step)
        for step in steps
        if step.options.pool_ranks <= MOST_RANKS and sum(len(each) for each in step.lengths) <= _MOST_DOCUMENTS
    ]


def fingerprint_of(plans: Iterable[StepPlan]) -> int:
    """One fingerprint of several plans."""
    value = 0
    for plan in plans:
        value = zlib.crc32(plan.fingerprint.to_bytes(4, "little"), value)
    return value


def figures_of(plans: list[StepPlan]) -> dict[str, Any]:
    """The fingerprint of several plans, how level they are and the GiB that travel for one layer.

    How level a plan is, is its slowest servers' seconds of attention over those of mean servers, of all phases."""
    balances = [plan.balance() for plan in plans]
    slowest = [each.seconds_after.max(axis=1).sum() / each.seconds_after.mean(axis=1).sum() for each in balances]
    return {
        "fingerprint": fingerprint_of(plans),
        "plans": len(plans),
        "slowest_over_mean": float(statistics.fmean(slowest)),
        "gib": sum(each.bytes_moved for each in balances) / 2**30,
    }


def together(found: list[dict[str, Any]]) -> dict[str, float]:
    """The figures of all plans."""
    plans = sum(each["plans"] for each in found)
    slowest = sum(each["plans"] * each["slowest_over_mean"] for each in found) / plans
    return {"plans": plans, "slowest_over_mean": slowest, "gib": sum(each["gib"] for each in found)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="how many; all that are kept need %(default)s")
    parser.add_argument("--keep", action="store_true", help="write what is found")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    found = {str(first): figures_of(plans_of(first)) for first in range(0, given.steps, _TOGETHER)}
    if given.keep:
        report = {"command": "OMP_NUM_THREADS=1 python -m benchmarks.planner_same --keep", "versions": versions()}
        total = together(list(found.values()))
        write_report(given.out, report | {"steps": given.steps, "together": total, "by_ten_steps": found})
        return 0
    kept = read_object(given.out)["by_ten_steps"]
    other = [first for first, each in found.items() if kept[first]["fingerprint"] != each["fingerprint"]]
    sys.stdout.write(f"{len(found) - len(other)} of {len(found)} as kept; steps from {other or 'none'} differ\n")
    for name, each in {"kept": kept, "now": found}.items() if other else ():
        sys.stdout.write(f"{name}: {together([each[first] for first in other])}\n")
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
