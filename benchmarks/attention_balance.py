"""Does every attention server take the time that the planner predicts? Plans of real mixes, run and timed.

    distca profile --output table.json
    python benchmarks/attention_balance.py --table table.json --output benchmarks/results/attention_balance.json

What a server computes does not depend on the others, so the servers of a plan, 8 and 32 by default, are dealt to
whatever GPUs this machine has (ranks on CPUs) and run one after the other: forward and backward of every server's fused
batch, on random rows, with the functions that a training step runs. Nothing is sent. Batches are timed in rounds, each
time in another order (``distca/profile/timing.py`` says why), as often as ``--seconds`` allow.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from attention_balance_report import DIRECTIONS, Batch, by_case, factor_of, groups_of, plain, show
from gpu_state import GpuState

from distca.attention import choose_kernel
from distca.commands.versions import hardware, versions
from distca.data.mixes import Mix, sample_lengths
from distca.errors import PlanError
from distca.plan import AttentionShape, CostModel, TableCost, load_table, plan_micro_batch
from distca.plan.cost.table_file import find_table
from distca.profile.timing import TimedServer, route_of_tasks
from distca.testing.ranks import run_ranks

ORDERS = ("document", "longest_first")


def main() -> None:
    arguments = _arguments()
    batches = [batch for batch in _batches(arguments, _cost(arguments)) if len(batch.q_rows)]
    for number, batch in enumerate(batches):
        batch.gpu = number % arguments.ranks
    dealt = [[batch for batch in batches if batch.gpu == rank] for rank in range(arguments.ranks)]
    rounds = _rounds(dealt, arguments.seconds)
    with GpuState() as state:
        tasks = [[(batch.q_rows, batch.kv_rows) for batch in mine] for mine in dealt]
        gpus = torch.cuda.device_count() > 0
        taken = run_ranks(arguments.ranks, _serve, tasks, arguments.shape, rounds, timeout=900.0, gpus=gpus)
    for mine, theirs in zip(dealt, taken, strict=True):
        for batch, (measured, noise) in zip(mine, theirs, strict=True):
            batch.measured, batch.noise = measured, noise
    factors: list[dict[str, float]] = [{side: factor_of(mine, side) for side in DIRECTIONS} for mine in dealt]
    groups = groups_of(batches, factors)
    report = {
        "command": shlex.join(["python", "benchmarks/attention_balance.py", *sys.argv[1:]]),
        "hardware": hardware(arguments.ranks),
        "versions": versions(),
        "table": str(arguments.table or "the package's"),
        "tokens_per_server": arguments.tokens,
        "rounds": rounds,
        "gpus": [
            {"measured_over_predicted": factor, **about}
            for factor, about in zip(factors, state.summaries(arguments.ranks), strict=True)
        ],
        "groups": groups,
        "cases": [plain(case, same) for case, same in by_case(batches)],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show(groups)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--table", type=Path, help="a cost table of `distca profile`; by default the package's")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2, help="GPUs, or processes on CPUs")
    parser.add_argument("--servers", type=int, nargs="+", default=[8, 32], help="sizes of the planned pools")
    parser.add_argument("--mixes", nargs="+", choices=get_args(Mix), default=list(get_args(Mix)))
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens per server")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--halves", type=int, default=1, choices=(1, 2), help="nano-batches; 2 is ping and pong")
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=["document"], help="of a server's tasks")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long every GPU may measure, about")
    parser.add_argument("--shape", type=int, nargs=3, default=[32, 8, 128], metavar=("HEADS", "KV_HEADS", "HEAD_DIM"))
    return parser.parse_args()


def _cost(arguments: argparse.Namespace) -> TableCost:
    heads, kv_heads, head_dim = arguments.shape
    if arguments.table is not None:
        cost = load_table(arguments.table)
        if (cost.shape.heads, cost.shape.kv_heads, cost.shape.head_dim) != (heads, kv_heads, head_dim):
            raise PlanError(f"{arguments.table} was measured with {cost.shape}, not with --shape {arguments.shape}.")
        return cost
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found = find_table(device, _kernel(head_dim).name, heads, kv_heads, head_dim)
    if found is None:
        raise PlanError(
            f"There is no cost table of {device} with --shape {arguments.shape}: run `distca profile` first."
        )
    return found


def _kernel(head_dim: int) -> Any:
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    return choose_kernel("auto", device=device, dtype=dtype, head_dim=head_dim)


def _batches(arguments: argparse.Namespace, cost: CostModel) -> Iterator[Batch]:
    """Every server's batch of every plan, in every order asked for."""
    for mix in arguments.mixes:
        for servers in arguments.servers:
            for seed in range(arguments.seeds):
                lengths = sample_lengths(mix, arguments.tokens * servers, seed)
                made = plan_micro_batch(lengths, servers, cost, nano_batches=arguments.halves)
                for half, planned in enumerate(made.nano_batches):
                    tasks = planned.forward.tasks
                    q_rows, kv_rows = tasks.stop - tasks.start, tasks.stop
                    seconds = {side: cost.per_direction(side, q_rows, kv_rows)[0] for side in DIRECTIONS}
                    for server in range(servers):
                        mine = np.flatnonzero(tasks.server == server)
                        predicted: dict[str, float] = {side: float(seconds[side][mine].sum()) for side in DIRECTIONS}
                        for order in arguments.orders:
                            case = (mix, seed, servers, half, order)
                            at = mine[np.argsort(-kv_rows[mine], kind="stable")] if order == "longest_first" else mine
                            yield Batch(case, q_rows[at], kv_rows[at], predicted)


def _rounds(dealt: list[list[Batch]], seconds: float) -> int:
    once = max(sum(sum(batch.predicted.values()) for batch in mine) for mine in dealt)
    return min(max(int(seconds / once), 2), 9) if torch.cuda.is_available() else 2


def _serve(
    tasks: list[list[tuple[np.ndarray, np.ndarray]]], shape: list[int], rounds: int
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Median seconds and noise of this rank's batches; runs on every rank."""
    warnings.simplefilter("ignore")  # kernels compiled at first use have much to say
    mine = tasks[dist.get_rank()]
    if not mine:
        return []
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    dtype = torch.bfloat16 if gpu else torch.float32
    server = TimedServer(
        _kernel(shape[2]),
        AttentionShape(shape[0], shape[1], shape[2], dtype.itemsize),
        device,
        dtype,
        q_rows=max(int(q_rows.sum()) for q_rows, _ in mine),
        kv_rows=max(int(kv_rows.sum()) for _, kv_rows in mine),
    )
    routes = [route_of_tasks(q_rows, kv_rows, device) for q_rows, kv_rows in mine]
    taken = server.samples(routes, [rounds] * len(routes), warm_up_s=2.0 if gpu else 0.0)
    return [
        ({side: each.median(side) for side in DIRECTIONS}, {side: each.noise(side) for side in DIRECTIONS})
        for each in taken
    ]


if __name__ == "__main__":
    main()
