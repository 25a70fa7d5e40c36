"""Published balancers on the same batches, by one ruler; writes results/planner_duel.json. CPUs only.

    OMP_NUM_THREADS=1 python -m benchmarks.planner_duel

Every balancer says which rank computes which rows. The ruler (``judged``) is that of a layer of 8B, forward and
backward: attention by the package's table of an H200 with flash-attn-4, linear layers as that table measured them.
*Step over mean* is the slowest rank's seconds over what all ranks would take were they level, without keys that are
read twice: halves, or groups that run one after the other, add up. Keys and values travel once to every rank that reads
them, and no further: an all-gather moves more. Memory: the rows of the fullest rank, and the keys and values it
receives, over the mean rank's rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distca.baselines.dealing import Work, deal
from distca.baselines.layouts import HomePieces, head_tail, layout_of, whole, zigzag
from distca.data.mixes import sample_mix
from distca.plan import Links, Plan, imbalance, lay_out, plan_at_home, plan_micro_batch, server_seconds, traffic
from distca.plan.cost.linear import layer_weights
from distca.plan.cost.table_file import find_table

TOKENS, NODE, BLOCK = 131_072, 8, 128
RESULTS = Path(__file__).parent / "results" / "planner_duel.json"
MIXES = (("pretrain", None), ("prolong", None), ("pretrain-long", 131_072), ("prolong-long", 524_288))
_TABLE = find_table("NVIDIA H200", "flash4", 32, 8, 128)
assert _TABLE is not None and _TABLE.linear is not None
COST = _TABLE
LINEAR = (_TABLE.linear.forward + _TABLE.linear.backward) * layer_weights(4096, 14336, 32, 8, 128)
"""Seconds per token of a layer's matrix products."""


@dataclass(frozen=True)
class Found:
    """The answer of a balancer to a batch.

    Attributes:
        parts: plans that run one after the other.
        milliseconds: that it took, on one core.
        note: what it chose.
    """

    parts: list[Plan]
    milliseconds: float
    note: str = ""


def judged(found: Found, lengths: np.ndarray, servers: int) -> dict[str, float]:
    """The costs of a balancer's answer."""
    step = 0.0
    rows, received, busiest, moved = (np.zeros(servers) for _ in range(4))
    for plan in found.parts:
        step += float((server_seconds(plan, COST, "both") + LINEAR * plan.layout.q_rows).max())
        travels = traffic(plan)
        rows += plan.layout.q_rows
        received += travels.kv.received
        moved += 16 * travels.q.sent + 4 * travels.kv.sent
        busiest += travels.busiest(8, 8, 4)
    level = float(COST.per_direction("both", lengths, lengths).sum()) + LINEAR * float(lengths.sum())
    return {
        "step_over_mean": step * servers / level,
        "kb_per_token": float(moved.sum()) / float(lengths.sum()),
        "busiest_kb_per_token": float(busiest.max()) * servers / float(lengths.sum()),
        "most_rows": imbalance(rows),
        "most_received_rows": float(received.max()) * servers / float(lengths.sum()),
        "milliseconds": found.milliseconds,
    }


def timed(lengths: np.ndarray, servers: int, pieces: Callable[[], HomePieces], note: str = "") -> Found:
    """A balancer that says where rows live, and computes them there."""
    began = time.process_time()
    made = pieces()
    took = (time.process_time() - began) * 1e3
    return Found([plan_at_home(layout_of(made, lengths, servers))], took, note)


def distca(lengths: np.ndarray, servers: int) -> Found:
    """This package's planner: two halves, nodes of 8."""
    began = time.process_time()
    made = plan_micro_batch(lengths, servers, COST, nano_batches=2, links=Links(NODE if servers > NODE else 0))
    took = (time.process_time() - began) * 1e3
    return Found([half.forward for half in made.nano_batches], took)


def in_order(lengths: np.ndarray, servers: int) -> Found:
    """One document after the other, cut where a rank is full; every row is computed where it lives."""
    began = time.process_time()
    (layout,) = lay_out(lengths, servers)
    return Found([plan_at_home(layout)], (time.process_time() - began) * 1e3)


def variable(lengths: np.ndarray, servers: int) -> Found:
    """WLB-LLM's variable-length packing: whole documents, the longest first, to the rank with least linear plus
    attention time, whatever tokens it has then."""
    work = Work(LINEAR, float(COST.per_direction("both", *(np.array([65_536]),) * 2).sum()) / (65_536 * 65_537 / 2))

    def pieces() -> HomePieces:
        found = deal(lengths, servers, work)
        assert found is not None
        return whole(lengths, found)

    return timed(lengths, servers, pieces)


def per_document(lengths: np.ndarray, servers: int) -> Found:
    """Per-document head–tail context parallelism by the best fixed degree, its groups filled longest first by work with
    at most 1.02 of their share of tokens."""
    work = Work(LINEAR, float(COST.per_direction("both", *(np.array([65_536]),) * 2).sum()) / (65_536 * 65_537 / 2))
    tried: list[tuple[float, Found]] = []
    for degree in (each for each in (1, 2, 4, 8, 16, 32, 64) if servers % each == 0):
        began = time.process_time()
        group_of = deal(lengths, servers // degree, work, int(1.02 * degree * lengths.sum() / servers))
        if group_of is None:
            continue
        made = head_tail(lengths, group_of, degree)
        took = (time.process_time() - began) * 1e3
        found = Found([plan_at_home(layout_of(made, lengths, servers))], took, f"degree {degree}")
        tried.append((judged(found, lengths, servers)["step_over_mean"], found))
    if not tried:
        raise ValueError("no degree up to 64 holds the longest document")
    return min(tried, key=lambda each: each[0])[1]


def torch_head_tail(lengths: np.ndarray, servers: int) -> Found:
    """torch's head–tail load balancer: the packed sequence in two chunks a rank, over all ranks."""
    return timed(lengths, servers, lambda: zigzag(lengths, np.zeros(len(lengths), np.int64), servers))


def torch_per_document(lengths: np.ndarray, servers: int) -> Found:
    """torch's per-document load balancer: every document head–tail over all ranks (which torch wants padded)."""
    return timed(lengths, servers, lambda: head_tail(lengths, np.zeros(len(lengths), np.int64), servers))


def torch_ptrr(lengths: np.ndarray, servers: int) -> Found:
    """torch's processing-time based round robin over blocks of 128 rows of the packed sequence, by its own function."""
    import torch
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _PTRRLoadBalancer

    ends = np.cumsum(lengths)

    def pieces() -> HomePieces:
        blocks = np.arange(int(ends[-1]) // BLOCK)
        # Unmasked blocks of keys of a block's last row: back to where its document begins.
        last = (blocks + 1) * BLOCK - 1
        first_of = (ends - lengths)[np.searchsorted(ends, last, side="right")]
        keys = torch.from_numpy(blocks - np.minimum(first_of // BLOCK, blocks) + 1)
        groups = _PTRRLoadBalancer.ptrr_scheduling(keys, servers).numpy()
        rank_of_block = np.empty(len(blocks), np.int64)
        rank_of_block[groups.reshape(-1)] = np.repeat(np.arange(servers), groups.shape[1])
        cuts = np.union1d(np.append(0, ends[:-1]), blocks * BLOCK)
        tops = np.append(cuts[1:], ends[-1])
        document = np.searchsorted(ends, cuts, side="right")
        rank = rank_of_block[cuts // BLOCK]
        begins = (ends - lengths)[document]
        order = np.argsort(rank, kind="stable")
        made = HomePieces(document, cuts - begins, tops - begins, rank, np.zeros(len(cuts), bool))
        return made.where(order)

    return timed(lengths, servers, pieces)


class _Ranks:
    """The part of a process group that the scheduler asks for."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks


def megatron_balanced(lengths: np.ndarray, servers: int) -> Found:
    """Megatron-Core's BalancedCPScheduler (hybrid context parallelism), by its own code: groups of documents that run
    one after the other, each document head–tail over a power of two of ranks; the best of three lengths per rank."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    tried: list[tuple[float, Found]] = []
    for per_rank in (8192, 32_768, TOKENS):
        began = time.process_time()
        scheduler = BalancedCPScheduler(per_rank, _Ranks(servers))
        if max(map(scheduler.gpus_needed, lengths.tolist())) > servers:
            continue
        _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)
        took = (time.process_time() - began) * 1e3
        parts = [_members(group, lengths, servers) for group in groups]
        found = Found(parts, took, f"max_seqlen_per_dp_cp_rank {per_rank}, {len(groups)} groups")
        tried.append((judged(found, lengths, servers)["step_over_mean"], found))
    return min(tried, key=lambda each: each[0])[1]


def _members(group: list[list[int]], lengths: np.ndarray, servers: int) -> Plan:
    """A group's documents on the ranks that the scheduler gave them to."""
    ranks_of: dict[int, list[int]] = {}
    for rank, samples in enumerate(group):
        for sample in samples:
            ranks_of.setdefault(sample, []).append(rank)
    chosen = np.array(sorted(ranks_of), np.int64)
    columns: list[np.ndarray] = []
    for number, sample in enumerate(chosen.tolist()):
        ranks = np.array(ranks_of[sample])
        made = head_tail(lengths[[sample]], np.zeros(1, np.int64), len(ranks))
        columns.append(np.stack((made.document + number, made.start, made.stop, ranks[made.rank], made.late)))
    document, start, stop, rank, late = np.concatenate(columns, axis=1)
    order = np.argsort(rank, kind="stable")
    pieces = HomePieces(document, start, stop, rank, late.astype(bool)).where(order)
    return plan_at_home(layout_of(pieces, lengths[chosen], servers))


BALANCERS: dict[str, Callable[[np.ndarray, int], Found]] = {
    "distca": distca,
    "in order": in_order,
    "WLB variable packing": variable,
    "per-document CP, best degree": per_document,
    "torch head-tail": torch_head_tail,
    "torch per-document head-tail": torch_per_document,
    "torch PTRR": torch_ptrr,
    "Megatron-Core BalancedCPScheduler": megatron_balanced,
}


def case(mix: str, context: int | None, servers: int, seeds: int, most: dict[str, int]) -> dict[str, Any]:
    """Every balancer's figures, medians over seeds; why not, where one cannot."""
    results: dict[str, Any] = {}
    for name, balance in BALANCERS.items():
        if servers > most.get(name, servers):
            results[name] = f"not run above {most[name]} servers: takes minutes, or memory for every pair of ranks"
            continue
        rows, notes = [], set()
        try:
            for seed in range(seeds):
                lengths = sample_mix(mix, servers * TOKENS, seed, context=context)
                found = balance(lengths, servers)
                rows.append(judged(found, lengths, servers))
                notes.add(found.note)
        except (ValueError, IndexError, AssertionError) as error:
            results[name] = f"{type(error).__name__}: {error}"
            continue
        results[name] = {key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]}
        if notes - {""}:
            results[name]["chose"] = sorted(notes)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--servers", type=int, nargs="+", default=(8, 64, 512))
    options = parser.parse_args()
    import torch
    from megatron.core.package_info import __version__ as megatron_version

    cases: dict[str, Any] = {}
    versions = {"python": sys.version.split()[0], "numpy": np.__version__, "torch": torch.__version__.split("+")[0]}
    results = {
        "command": "OMP_NUM_THREADS=1 python -m benchmarks.planner_duel",
        "versions": {**versions, "megatron-core": megatron_version},
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "seeds": options.seeds,
        "cases": cases,
    }
    most = dict.fromkeys(("Megatron-Core BalancedCPScheduler", "torch per-document head-tail", "torch PTRR"), 64)
    for servers in options.servers:
        for mix, context in MIXES:
            name = f"{mix} {servers}" + (f", context {context // 1024}K" if context else "")
            cases[name] = case(mix, context, servers, options.seeds, most)
            for balancer, found in cases[name].items():
                print(f"{name}: {balancer}: {found}", flush=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
