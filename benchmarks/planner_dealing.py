"""The savings of dealing a step's documents over its micro-batches anew; writes results/planner_dealing.json.

    OMP_NUM_THREADS=1 python -m benchmarks.planner_dealing

Steps of four or eight micro-batches as the sampler packs them, contexts of 128K, 128K tokens per rank, every rank a
node of its own: planned as packed and dealt anew, without stages and with 2 and 4, whose phases level linear layers of
8B with attention. Predicted by the package's table of an H200; nothing runs on GPUs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from distca.data.corpus import Corpus
from distca.data.mixes import Mix, sample_long_context
from distca.data.sampler import Sampler
from distca.data.sources.mix import RandomTokens
from distca.plan import Links, PlanOptions, plan_step
from distca.plan.cost.linear import NonAttention
from distca.plan.cost.table_file import find_table
from distca.versions import versions, write_report

TOKENS, STEPS = 131_072, 8
WEIGHTS = 4096 * 128 * 80 + 3 * 4096 * 14336
"""Weights of a layer of 8B."""
POOLS = ((2, 1, 4), (4, 1, 4), (8, 1, 4), (2, 2, 4), (4, 2, 8), (2, 4, 8))
"""Data-parallel ranks, stages and micro-batches."""
RESULTS = Path(__file__).parent / "results" / "planner_dealing.json"
MIXES: tuple[Mix, ...] = ("pretrain", "prolong")


def case(mix: Mix, ranks: int, stages: int, micro_batches: int) -> dict[str, dict[str, float]]:
    """Means over steps, of one layer."""
    cost = find_table("NVIDIA H200", "flash4", 32, 8, 128)
    assert cost is not None
    drawn = sample_long_context(mix, STEPS * micro_batches * ranks * TOKENS, TOKENS, 1)
    lengths = Corpus(RandomTokens(drawn, 64, 1), TOKENS).train.lengths
    sampler = Sampler(lengths, ranks, TOKENS, micro_batches, 1, whole=True)
    linear = cost.linear
    assert linear is not None
    row = NonAttention(linear.forward * WEIGHTS, linear.backward * WEIGHTS)
    options = PlanOptions(
        ranks,
        cost,
        stages=stages,
        nano_batches=2,
        resend=stages > 1,
        links=Links(1),
        non_attention=row if stages > 1 else None,
    )
    found = {name: np.zeros(4) for name in ("as packed", "dealt anew")}
    for _ in range(STEPS):
        step = [micro_batch.lengths for micro_batch in sampler.next()]
        for name, room in (("as packed", None), ("dealt anew", [ranks * TOKENS] * micro_batches)):
            plan = plan_step(step, options, room=room)
            balance = plan.balance()
            tasks = sum(len(each.tasks) for phase in plan.forward for each in phase.plans)
            moved = sum((origin[:, 0] != number).sum() for number, origin in enumerate(plan.drawn))
            seconds = float((balance.seconds_after + balance.other_seconds).max(axis=1).sum()) * 1e3
            found[name] += (balance.bytes_moved / 2**30 / STEPS, seconds / STEPS, tasks / STEPS, moved / STEPS)
    names = ("gib_per_layer", "ms_per_layer", "tasks", "documents_elsewhere")
    return {name: dict(zip(names, figures.round(3).tolist(), strict=True)) for name, figures in found.items()}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    cases = {}
    for mix in MIXES:
        for ranks, stages, micro_batches in POOLS:
            name = f"{mix} {ranks}" + (f", {stages} stages, {micro_batches} micro-batches" if stages > 1 else "")
            cases[name] = case(mix, ranks, stages, micro_batches)
            print(f"{name}: {cases[name]}", flush=True)
    command = "OMP_NUM_THREADS=1 python -m benchmarks.planner_dealing"
    write_report(RESULTS, {"command": command, "versions": versions(), "steps": STEPS, "cases": cases})


if __name__ == "__main__":
    main()
