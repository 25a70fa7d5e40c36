"""Lays out and plans a hundred thousand micro-batches of every size and kind, and checks what must hold of each.

    OMP_NUM_THREADS=1 nice python -m benchmarks.planner_invariants --layouts 100000 --processes 2

Budgets are 1K to 256K tokens per rank, on 1 to 64 ranks, with one and two nano-batches, with and without stages.
Documents stay in the micro-batches that they were drawn for, or are dealt over them anew. Lengths are those of mixes
and adversarial ones. All micro-batches are laid out, and every so many steps are planned too, in pools of up to 64
servers. Nothing runs on GPUs. Results are kept in results/planner_invariants.json; the exit status is 1 if a step
fails, and each failure names the number of its step.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path

import numpy as np

from distca.data.mixes import MIX_NAMES, sample_mix
from distca.plan import (
    CostModel,
    Layout,
    Links,
    PlanOptions,
    StepPlan,
    analytic_cost,
    area_cost,
    deal_over_micro_batches,
    lay_out,
    plan_step,
    route,
    traffic,
)
from distca.plan.cost.linear import NonAttention
from distca.plan.cost.table_file import find_table
from distca.plan.layout import Shards
from distca.plan.place.lay_out import Placement
from distca.plan.place.nano_batches import Dealing
from distca.plan.place.shares import SMALL_POOL
from distca.versions import versions, write_report

RESULTS = Path(__file__).parent / "results" / "planner_invariants.json"
LEAST_TOKENS, MOST_TOKENS, MOST_RANKS = 1024, 262_144, 64
MOST_DOCUMENTS = 40_000
"""Documents of an adversarial micro-batch, which would otherwise have millions of one token."""
PLANNED_EVERY = 128
_TABLE = find_table("NVIDIA H200", "flash4", 32, 8, 128)
COSTS: tuple[CostModel, ...] = (analytic_cost(32, 8, 128), area_cost(), *(() if _TABLE is None else (_TABLE,)))
KINDS = (*MIX_NAMES * 3, "ones", "giant", "giant and ones", "exact", "nearly exact", "halves", "equal", "any")
_SHOWN = 20


@dataclass(frozen=True)
class Step:
    """One step to lay out or plan.

    Attributes:
        lengths: by micro-batch, tokens per document.
        homes: by micro-batch, the home rank of every document; None where documents may span ranks.
        room: most tokens of a micro-batch over which documents are dealt anew; None leaves them where they are.
        options: how to plan.
        kind: of lengths.
    """

    lengths: list[np.ndarray]
    homes: list[np.ndarray] | None
    room: int | None
    options: PlanOptions
    kind: str


def drawn(number: int) -> Step:
    """The step of that number."""
    any_of = np.random.default_rng((2026, number))
    ranks = int(np.exp(any_of.uniform(0, np.log(MOST_RANKS + 1))))
    budget = int(np.exp(any_of.uniform(np.log(LEAST_TOKENS), np.log(MOST_TOKENS))))
    if any_of.random() < 0.4:
        budget = 1 << round(np.log2(budget))
    stages, micro_batches = int(any_of.choice((1, 1, 2, 4))), int(any_of.integers(1, 4))
    kind = str(any_of.choice(KINDS))
    lengths = [_lengths(kind, ranks, budget, any_of) for _ in range(micro_batches)]
    whole = any_of.random() < 0.05
    homes = [any_of.integers(0, ranks, len(each)) for each in lengths] if whole else None
    room = None
    if not whole and any_of.random() < 0.5:
        room = max(ranks * budget, *(int(each.sum()) for each in lengths)) if micro_batches > 1 else ranks * budget
    node = int(any_of.choice([0, *(size for size in (2, 4, 8) if ranks % size == 0)]))
    options = PlanOptions(
        ranks,
        COSTS[int(any_of.integers(len(COSTS)))],
        stages=stages,
        nano_batches=int(any_of.integers(1, 3)),
        align=int(any_of.choice((1, 1, 4, 8))),
        resend=stages > 1 or any_of.random() < 0.3,
        links=Links(node),
        non_attention=NonAttention(2e-7, 4e-7) if stages > 1 and any_of.random() < 0.5 else None,
    )
    return Step(lengths, homes, room, options, kind)


def _lengths(kind: str, ranks: int, budget: int, any_of: np.random.Generator) -> np.ndarray:
    """[D] tokens per document of one micro-batch, which most often fills every rank's budget."""
    total = ranks * budget
    if any_of.random() < 0.3:
        total = max(1, int(any_of.choice((total - 1, total * any_of.random(), ranks - 1, ranks, 3 * ranks))))
    seed = int(any_of.integers(1 << 30))
    if kind in MIX_NAMES:
        context = None if any_of.random() < 0.5 else int(any_of.choice((budget, 2 * budget, 4 * budget, 131_072)))
        return sample_mix(kind, total, seed, context=context)
    if kind == "giant":
        return np.array([total])
    if kind == "ones" or kind == "giant and ones":
        ones = min(total, int(any_of.integers(1, MOST_DOCUMENTS)))
        rest = [] if kind == "ones" or total == ones else [total - ones]
        return any_of.permutation(np.append(np.ones(ones, np.int64), np.array(rest, np.int64)))
    if kind == "any":
        some = np.exp(any_of.uniform(0, np.log(max(total, 2)), 4096)).astype(np.int64)
    else:
        own = {"equal": int(any_of.integers(1, total + 1)), "halves": -(-budget // 2)}.get(kind, budget)
        off = any_of.integers(-1, 2, 4096) if kind in ("nearly exact", "halves") else 0
        some = np.maximum(np.full(4096, max(own, total // 4096 + 1)) + off, 1)
    ends = np.cumsum(some)
    kept = some[: int(np.searchsorted(ends, total)) + 1].copy()
    kept[-1] -= max(int(kept.sum()) - total, 0)
    return kept[kept > 0]


def lay_out_step(step: Step) -> list[tuple[np.ndarray, tuple[Layout, ...]]]:
    """Every micro-batch with its layout, as training has them laid out; in small pools one of both placements."""
    options, lengths = step.options, step.lengths
    if step.room is not None:
        flat = np.concatenate(lengths)
        found = deal_over_micro_batches(flat, [step.room] * len(lengths), options.stages)
        if found is not None:
            _need(sorted(np.concatenate(found).tolist()) == list(range(len(flat))), "a document was lost in dealing")
            lengths = [flat[each] for each in found]
    dealing: Dealing = "lean" if options.stages == 1 else "even"
    laid = []
    for number, each in enumerate(lengths):
        odd = (int(each.sum()) + number) % 2 == 1
        placement: Placement = "spread_by_nano_batch" if options.ranks <= SMALL_POOL and odd else "spread"
        layouts = lay_out(
            each,
            options.ranks,
            nano_batches=options.nano_batches,
            rank_of=None if step.homes is None else step.homes[number],
            align=options.align,
            dealing=dealing,
            placement=placement,
            cost=options.cost,
            ranks_per_node=options.stage_node,
        )
        laid.append((each, layouts))
    return laid


def plan_of(step: Step) -> StepPlan:
    """The step's plan."""
    room = None if step.room is None else [step.room] * len(step.lengths)
    return plan_step(step.lengths, step.options, step.homes, room)


def check_layouts(lengths: np.ndarray, layouts: tuple[Layout, ...], options: PlanOptions, whole: bool) -> None:
    """Raise AssertionError unless every row of every document has one home, and ranks keep to their budgets."""
    _need(len(layouts) == options.nano_batches, "another number of nano-batches than asked for")
    done, total = np.zeros(len(lengths), np.int64), int(lengths.sum())
    for half, layout in enumerate(layouts):
        some = layout.last > layout.first
        _need(bool((layout.first[some] == done[some]).all()), "a nano-batch does not begin where the last one ended")
        done = np.where(some, layout.last, done)
        _check_shards(layout.q, layout.first, layout.last, layout.q_rows, "query rows")
        _check_shards(layout.kv, np.zeros_like(layout.last), np.where(some, layout.last, 0), layout.kv_rows, "k,v rows")
        if half:
            carried = layout.kv.row < layout.carried_rows[layout.kv.rank]
            ping = layouts[0]
            _need(_rows_of(layout.kv, carried, layout.carried_rows) <= _rows_of(ping.q, None, ping.q_rows), "carried")
        if not whole:
            units = -(-layout.q_rows // options.align)
            _need(int(units.max() - units.min()) <= 1, "ranks have unequal rows")
    _need(bool((done == lengths).all()), "rows without a home")
    rows = np.sum([layout.q_rows for layout in layouts], axis=0)
    _need(int(rows.sum()) == total, "rows are lost or made up")
    if not whole:
        most = -(-total // options.ranks) + 2 * options.align
        _need(int(rows.max()) <= most, "a rank has more rows than its budget")
        if len(layouts) == 2:
            half_of = min(total, -(-total // (2 * options.align)) * options.align)
            longer = half_of / 32 + options.ranks * options.align
            _need(half_of <= layouts[0].tokens <= half_of + longer, "ping is not half")


def _check_shards(shards: Shards, first: np.ndarray, last: np.ndarray, rows: np.ndarray, what: str) -> None:
    """Shards cover [first, last) [D] of every document once, and the rows [R] of every rank's tensor."""
    document, start, stop, rank, row = shards.columns()
    if not len(document):
        _need(not rows.any() and not (last > first).any(), f"no {what}")
        return
    _need(bool((stop > start).all() and start.min() >= 0 and rank.min() >= 0 and rank.max() < len(rows)), f"odd {what}")
    _need(document.min() >= 0 and document.max() < len(first), f"{what} of no document")
    head = np.append(True, document[1:] != document[:-1])
    _need(bool((np.diff(document) >= 0).all()), f"{what} are not sorted")
    _need(bool((start[~head] == stop[:-1][~head[1:]]).all()), f"{what} have a hole or an overlap")
    _need(bool((start[head] == first[document[head]]).all()), f"{what} do not begin with the first")
    tail = np.append(head[1:], True)
    _need(bool((stop[tail] == last[document[tail]]).all()), f"{what} do not end with the last")
    _need(int(head.sum()) == int((last > first).sum()), f"{what} lack a document")
    order = np.lexsort((row, rank))
    rank, row, ends = rank[order], row[order], (row + stop - start)[order]
    begins = np.append(True, rank[1:] != rank[:-1])
    _need(bool((row[begins] == 0).all() and (row[~begins] == ends[:-1][~begins[1:]]).all()), f"{what} share a place")
    _need(bool((np.bincount(rank, ends - row, len(rows)) == rows).all()), f"{what} are not a rank's budget")


def _rows_of(shards: Shards, chosen: np.ndarray | None, rows: np.ndarray) -> set[tuple[int, int, int, int, int]]:
    """Shards by document, start, stop, rank and row counted from the end of the rank's [R] ``rows``."""
    columns = [column if chosen is None else column[chosen] for column in shards.columns()]
    columns[4] = rows[columns[3]] - columns[4]
    return set(zip(*(column.tolist() for column in columns), strict=True))


def check_plan(made: StepPlan, step: Step) -> None:
    """Raise unless layouts hold and every query row of every phase is computed exactly once; routes are made too."""
    for lengths, layouts in zip(made.lengths, made.layouts, strict=True):
        check_layouts(lengths, layouts, step.options, step.homes is not None)
    _need(sorted(np.concatenate(made.lengths).tolist()) == sorted(np.concatenate(step.lengths).tolist()), "documents")
    for number, (_, phase) in enumerate(made.phases):
        for plan in phase.plans:
            plan.check()
            own = route(plan, number % plan.layout.ranks, step.options.links)
            _need(own.kv.destination_rows >= 0 and own.q.destination_rows == own.cu_q[-1], "a route lacks rows")
            traffic(plan, step.options.links)


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


@dataclass
class Tally:
    """The results of a share of the steps."""

    steps: int = 0
    layouts: int = 0
    planned: int = 0
    plans: int = 0
    kinds: Counter[str] = None  # type: ignore[assignment]
    failures: list[str] = None  # type: ignore[assignment]
    slowest: tuple[float, int] = (0.0, -1)


def tried(numbers: Iterable[int], planned_every: int) -> Tally:
    """Lay out steps of those numbers, and plan every so many of them."""
    tally = Tally(kinds=Counter(), failures=[])
    for number in numbers:
        began, doing = time.process_time(), "draw"
        try:
            step = drawn(number)
            doing = "layout"
            for lengths, layouts in lay_out_step(step):
                check_layouts(lengths, layouts, step.options, step.homes is not None)
                tally.layouts += 1
            if number % planned_every == 0 and step.options.pool_ranks <= MOST_RANKS:
                doing = "plan"
                made = plan_of(step)
                check_plan(made, step)
                tally.planned += 1
                tally.plans += sum(len(phase.plans) for _, phase in made.phases)
            tally.kinds[step.kind] += 1
        except Exception as error:  # any failure counts
            where = traceback.extract_tb(error.__traceback__)[-1]
            tally.failures.append(f"{number}, {doing}: {type(error).__name__}: {error} ({where.name}:{where.lineno})")
        tally.steps += 1
        tally.slowest = max(tally.slowest, (time.process_time() - began, number))
    return tally


_CHUNK = 50


def _chunk(chunk: tuple[int, int]) -> Tally:
    first, planned_every = chunk
    # Numbers that are none end up in layouts as integers: numpy's warnings of them are failures.
    warnings.simplefilter("error")
    return tried(range(first, first + _CHUNK), planned_every)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=int, default=100_000, help="how many at least")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which it ends with what it has")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="number of the first step")
    parser.add_argument("--planned_every", type=int, default=PLANNED_EVERY)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    began, total = time.perf_counter(), Tally(kinds=Counter(), failures=[])
    chunks = ((given.first + _CHUNK * at, given.planned_every) for at in range(given.layouts))
    with Pool(given.processes) as pool:
        for part in pool.imap_unordered(_chunk, chunks):
            total.steps, total.layouts = total.steps + part.steps, total.layouts + part.layouts
            total.planned, total.plans = total.planned + part.planned, total.plans + part.plans
            total.kinds.update(part.kinds)
            total.failures += part.failures
            total.slowest = max(total.slowest, part.slowest)
            if total.layouts >= given.layouts or time.perf_counter() - began > 60 * given.minutes:
                pool.terminate()
                break
    total.failures.sort(key=lambda each: int(each.partition(",")[0]))
    failed = Counter(each.partition(": ")[2] for each in total.failures)
    report = {
        "command": "OMP_NUM_THREADS=1 python -m benchmarks.planner_invariants",
        "versions": versions(),
        "drawn": {
            "tokens_per_rank": [LEAST_TOKENS, MOST_TOKENS],
            "ranks": [1, MOST_RANKS],
            "stages": [1, 2, 4],
            "micro_batches": [1, 3],
            "nano_batches": [1, 2],
            "align": [1, 4, 8],
            "most_documents_of_one_token": MOST_DOCUMENTS,
            "steps": [given.first, given.first + total.steps],
            "planned_every": given.planned_every,
        },
        "steps": total.steps,
        "layouts": total.layouts,
        "steps_planned": total.planned,
        "plans": total.plans,
        "steps_by_kind": dict(sorted(total.kinds.items())),
        "failures": len(total.failures),
        "failures_by_message": dict(failed.most_common(_SHOWN)),
        "first_failures": total.failures[:_SHOWN],
        "slowest_step": {"cpu_s": round(total.slowest[0], 2), "number": total.slowest[1]},
        "minutes": round((time.perf_counter() - began) / 60, 1),
        "processes": given.processes,
    }
    write_report(given.out, report)
    print(report)
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
