"""What dealing a step's documents over its micro-batches anew saves; writes results/planner_dealing.json.

    OMP_NUM_THREADS=1 python -m benchmarks.planner_dealing

Steps of four micro-batches as the sampler packs them, contexts of 128K, 128K tokens per rank, every rank a node of its
own: planned as packed and dealt anew. Predicted by the package's table of an H200; nothing runs on GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from distca.data.corpus import Corpus
from distca.data.mixes import Mix, sample_long_context
from distca.data.sampler import Sampler
from distca.data.sources.mix import RandomTokens
from distca.plan import Links, PlanOptions, plan_step
from distca.plan.cost.table_file import find_table

TOKENS, MICRO_BATCHES, STEPS = 131_072, 4, 8
RESULTS = Path(__file__).parent / "results" / "planner_dealing.json"
MIXES: tuple[Mix, ...] = ("pretrain", "prolong")


def case(mix: Mix, ranks: int) -> dict[str, dict[str, float]]:
    """Means over steps, of one layer."""
    cost = find_table("NVIDIA H200", "flash4", 32, 8, 128)
    assert cost is not None
    drawn = sample_long_context(mix, STEPS * MICRO_BATCHES * ranks * TOKENS, TOKENS, 1)
    lengths = Corpus(RandomTokens(drawn, 64, 1), TOKENS).train.lengths
    sampler = Sampler(lengths, ranks, TOKENS, MICRO_BATCHES, 1, whole=True)
    options = PlanOptions(ranks, cost, nano_batches=2, links=Links(1))
    found = {name: np.zeros(4) for name in ("as packed", "dealt anew")}
    for _ in range(STEPS):
        step = [micro_batch.lengths for micro_batch in sampler.next()]
        for name, room in (("as packed", None), ("dealt anew", [ranks * TOKENS] * MICRO_BATCHES)):
            plan = plan_step(step, options, room=room)
            balance = plan.balance()
            tasks = sum(len(each.tasks) for phase in plan.forward for each in phase.plans)
            moved = sum((origin[:, 0] != number).sum() for number, origin in enumerate(plan.drawn))
            attention = float(balance.seconds_after.max(axis=1).sum()) * 1e3
            found[name] += (balance.bytes_moved / 2**30 / STEPS, attention / STEPS, tasks / STEPS, moved / STEPS)
    names = ("gib_per_layer", "attention_ms_per_layer", "tasks", "documents_elsewhere")
    return {name: dict(zip(names, figures.round(3).tolist(), strict=True)) for name, figures in found.items()}


def main() -> None:
    cases = {}
    for mix in MIXES:
        for ranks in (2, 4, 8):
            cases[f"{mix} {ranks}"] = case(mix, ranks)
            print(f"{mix} {ranks}: {cases[f'{mix} {ranks}']}", flush=True)
    results = {"command": "OMP_NUM_THREADS=1 python -m benchmarks.planner_dealing", "steps": STEPS, "cases": cases}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
