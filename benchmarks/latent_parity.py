"""Latent attention against unmodified Megatron-Core on one document at a time, in every layout of ranks.

    python -m benchmarks.latent_parity --output benchmarks/results/parity_latent.json

Float32 on CPU ranks: loss, the gradient that differs most, and with experts their biases after a step and the rows that
each got. The command fails where something differs.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

from distca.parity.worlds import OF_EXPERTS, World
from distca.testing.ranks import run_ranks
from distca.versions import command_line, header, write_report

WORLDS = (*OF_EXPERTS, World(3), World(4, pp=2), World(4, tp=4), World(4, tp=2, pp=2))


def _compared(world: World) -> list[dict[str, Any]]:
    """Figures of every case of a world; runs on each of its ranks."""
    import torch

    from megatron_patches.patches.cpu import use_cpu

    warnings.filterwarnings("ignore")
    use_cpu()
    from distca.parity.experts import expert_differences
    from distca.parity.latent_cases import latent_cases, latent_expert_cases
    from distca.parity.suite import float32_differences

    layout = {"ranks": world.ranks, "tp": world.tp, "pp": world.pp, "ep": world.ep}
    found = []
    for cases, compare in (
        (latent_cases(world.tp, pp=world.pp), float32_differences),
        (latent_expert_cases(world.tp, world.pp, world.ep), expert_differences),
    ):
        for case, figures in zip(cases, compare(cases, torch.device("cpu")), strict=True):
            how = {"backward": case.backward, "recompute": case.recompute, "ping_pong": case.ping_pong}
            found.append(layout | how | {"config": dict(case.config)} | figures)
    return found


def main() -> None:
    """Write the report; exit code 1 where something differs."""
    from distca.parity.suite import FLOAT32_TOLERANCE

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    asked = parser.parse_args()
    rows = [row for world in WORLDS for row in run_ranks(world.ranks, _compared, world, timeout=900.0)[0]]
    found = {name: [row.get(name, 0.0) for row in rows] for name in ("loss", "gradient", "bias", "load")}
    worst = {name: max(values) for name, values in found.items()}
    report = {
        **header(command_line("python -m benchmarks.latent_parity"), max(world.ranks for world in WORLDS)),
        "tolerance": FLOAT32_TOLERANCE,
        "worst": worst,
        "cases": rows,
    }
    write_report(asked.output, report)
    sys.stdout.write(f"{len(rows)} cases, worst {worst}\n")
    # What is no number is not equal either.
    sys.exit(not all(value <= FLOAT32_TOLERANCE for values in found.values() for value in values))


if __name__ == "__main__":
    main()
