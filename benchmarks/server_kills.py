"""Ends or stops servers without a model at random moments of a step, and starts new ones. Every loss is compared with
that of a run whose servers leave and come at the same steps by schedule.

    OMP_NUM_THREADS=1 python -m benchmarks.server_kills                 # 50 kills on CPU ranks; a few minutes
    OMP_NUM_THREADS=1 python -m benchmarks.server_kills --kills 0 --stops 2 --out FILE
    OMP_NUM_THREADS=1 python -m benchmarks.server_kills --ep 2 --out FILE  # homes share experts, servers have none
    OMP_NUM_THREADS=1 python -m benchmarks.server_kills --pattern GM-*- --out FILE  # two layers are recurrent
    python -m benchmarks.server_kills --gpus --homes 1 --servers 1 --sockets --kills 2 --out FILE
    python -m benchmarks.server_kills --gpus --homes 1 --servers 1 --sockets --kills 0 --stops 1 --out FILE

On CPUs homes train a small model, and servers serve them, over gloo on this machine. With ``--gpus`` every home and
server has a GPU, and rows go by NCCL: as between nodes over ``--sockets``, else as GPUs are connected. A thread of the
first home loses a server after a random time, and starts another one. Lost is a server that is killed by SIGKILL, or
one that is stopped by SIGSTOP. Like a lost node, the latter closes no connection. The second run takes its changes
from the first one's record. Losses are float64 sums of float32 losses, by home. They must be equal bit for bit. With
experts so must their biases, and the rows that each got.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.server_kills_home import LostServer, Run, home
from benchmarks.server_kills_pool import How, Setup
from distca.testing.ranks import run_ranks
from distca.versions import command_line, header, write_report

RESULTS = Path(__file__).parent / "results" / "server_kills.json"
KILLED_S, STOPPED_S, JOIN_S = 20.0, 60.0, 20.0
"""Seconds in which a step must be over that loses a server, with its repetition, and in which a server must join."""


def compared(ways: list[How], setup: Setup, seed: int = 0) -> dict[str, Any]:
    """Figures of both runs.

    Raises:
        AssertionError: a loss differs, or a bias or load of experts.
    """
    runs: list[list[Run]] = []
    for schedule in (False, True):
        with tempfile.TemporaryDirectory(prefix="distca-kills-") as folder:
            wanted = runs[0][0].servers if schedule else []
            patience = 150.0 + 40.0 * len(ways)  # a start, and what steps may take
            runs.append(run_ranks(setup.homes, home, folder, ways, wanted, seed, setup, timeout=patience))
    lost, scheduled = runs
    for number, (one, other) in enumerate(zip(lost, scheduled, strict=True)):
        differ = [step for step, pair in enumerate(zip(one.losses, other.losses, strict=True)) if pair[0] != pair[1]]
        assert not differ, f"losses of home {number} differ in steps {differ}"
        assert one.experts == other.experts, f"biases or loads of experts on home {number} differ"
    first = lost[0]
    return {
        **asdict(setup),
        "steps": len(first.losses),
        "last_loss": first.losses[-1],
        "losses_equal_to_those_by_schedule": True,
        **({"biases_and_loads_of_experts_equal": True} if setup.ep else {}),
        "step_s": first.step_s,
        **{how: _figures([each for each in first.lost if each.how == how]) for how in dict.fromkeys(ways)},
        "join_s": _spread(first.joins_s),
        "join_from_asking_s": _spread(first.joins_asked_s),
        "each": [asdict(each) for each in first.lost],
    }


def _figures(lost: list[LostServer]) -> dict[str, Any]:
    return {
        "servers": len(lost),
        "found_in_their_step": sum(each.in_its_step for each in lost),
        "step_with_repetition_s": _spread([each.lasted_s for each in lost]),
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    return {"median": float(np.median(seconds)), "most": max(seconds)} if seconds else {}


def missed(found: dict[str, Any]) -> list[str]:
    """The changes that took longer than they may."""
    took = {how: found.get(how, {}).get("step_with_repetition_s", {}).get("most", 0.0) for how in ("killed", "stopped")}
    took["join"] = found["join_s"].get("most", 0.0)
    limits = {"killed": KILLED_S, "stopped": STOPPED_S, "join": JOIN_S}
    return [f"{what} took {took[what]:.1f} s, limit {most:g}" for what, most in limits.items() if took[what] > most]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="servers that are killed")
    parser.add_argument("--stops", type=int, default=0, help="servers that are stopped, as if their node were lost")
    parser.add_argument("--seed", type=int, default=0)
    for name, default in (("homes", 2), ("servers", 4), ("tp", 1), ("pp", 1), ("ep", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pattern", default="", help="layers of a HybridModel, without --ep and --gpus")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each home and server, and NCCL")
    parser.add_argument("--sockets", action="store_true", help="every GPU is a machine of its own to NCCL")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if not given.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    setup = Setup(given.homes, given.servers, given.tp, given.pp, given.ep, given.pattern, given.gpus, given.sockets)
    ways: list[How] = [*["killed"] * given.kills, *["stopped"] * given.stops]  # type: ignore[list-item]
    report = header(command_line("python -m benchmarks.server_kills"), setup.homes + setup.servers)
    found = compared(ways, setup, given.seed)
    write_report(given.out, report | found)
    for sentence in missed(found):
        sys.stderr.write(sentence + "\n")
    return 1 if missed(found) else 0


if __name__ == "__main__":
    sys.exit(main())
