"""Plans random steps on equal servers and compares each plan's fingerprint with the kept one: plans that should not
have changed have not.

    OMP_NUM_THREADS=1 python -m benchmarks.planner_same            # compare; the exit status is 1 where one differs
    OMP_NUM_THREADS=1 python -m benchmarks.planner_same --keep     # plans were meant to change: keep the new ones

Steps are those of ``planner_invariants``: pools of up to 64 servers, with and without stages, one and two nano-batches.
Fingerprints are kept in results/planner_same.json, one for every ten steps. They are those of one machine and version
of numpy: another may round a sum otherwise, so compare two versions of the planner on the same machine.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from pathlib import Path

from benchmarks.planner_invariants import MOST_RANKS, drawn, plan_of
from distca.json_file import read_object
from distca.versions import versions, write_report

RESULTS = Path(__file__).parent / "results" / "planner_same.json"
STEPS = 300
_TOGETHER = 10
_MOST_DOCUMENTS = 4000
"""Documents of a step at most: one of more takes seconds to plan."""


def fingerprints(first: int, steps: int) -> dict[str, int]:
    """Fingerprints of every ten steps from number ``first`` on, by the number of the first of them."""
    found = {}
    for chunk in range(first, first + steps, _TOGETHER):
        value = 0
        for number in range(chunk, chunk + _TOGETHER):
            step = drawn(number)
            if step.options.pool_ranks <= MOST_RANKS and sum(len(each) for each in step.lengths) <= _MOST_DOCUMENTS:
                value = zlib.crc32(plan_of(step).fingerprint.to_bytes(4, "little"), value)
        found[str(chunk)] = value
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="how many; all that are kept need %(default)s")
    parser.add_argument("--keep", action="store_true", help="write what is found")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    found = fingerprints(0, given.steps)
    if given.keep:
        report = {"command": "OMP_NUM_THREADS=1 python -m benchmarks.planner_same --keep", "versions": versions()}
        write_report(given.out, report | {"steps": given.steps, "fingerprints": found})
        return 0
    kept = read_object(given.out)["fingerprints"]
    other = [first for first, value in found.items() if kept[first] != value]
    sys.stdout.write(f"{len(found) - len(other)} of {len(found)} as kept; steps from {other or 'none'} differ\n")
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
