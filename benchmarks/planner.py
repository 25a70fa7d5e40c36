"""How well, how cheaply and how fast the planner balances; writes results/planner.json and the plot in docs/images.

    OMP_NUM_THREADS=1 python benchmarks/planner.py

Times are CPU milliseconds of one core (``time.process_time``), the least of five runs: planning runs in a background
thread, and wall time or a single run on a shared machine would measure its neighbours. "planner" is the default of
``plan_micro_batch``: documents are spread over ranks by work, then scheduled. "in_order" is the same scheduler on
documents laid out one after the other, and "plain_greedy" a simple scheduler on that layout. Costs are those of the
analytic model (32 query heads, 8 key/value heads, d 128, bf16, one H200's flash-attn-4 rates); "planner_with_table"
is the default with the measured table of one H200 that the package ships. Nothing here runs on GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import distca
from distca.data.mixes import Mix, sample_lengths, sample_long_context
from distca.plan import (
    CostModel,
    Direction,
    Layout,
    Plan,
    Tasks,
    analytic_cost,
    imbalance,
    lay_out,
    makespan_bound,
    plan_at_home,
    route,
    schedule,
    server_seconds,
    traffic,
)
from distca.plan.cost.table_file import find_table
from distca.plan.place.lay_out import Placement

TOKENS = 131_072
SEEDS = 10
RUNS = 5
SERVERS = (8, 32, 64, 256, 512)
MIXES: tuple[Mix, ...] = ("pretrain", "prolong")
TOLERANCES = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5)
COST = analytic_cost(32, 8, 128)
RELEASED = {"pretrain": (0.10, 0.46), "prolong": (0.04, 0.36)}
"""Share of all tokens that the released research planner moves as q and as k,v rows at 64 servers x 128K tokens."""
TABLE = find_table("NVIDIA H200", "flash4", 32, 8, 128)
assert TABLE is not None
KINDS: dict[str, tuple[Placement, CostModel]] = {
    "planner": ("spread", COST),
    "planner_with_table": ("spread", TABLE),
    "in_order": ("in_order", COST),
}
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
ROOT = Path(__file__).parent
_UNEVEN = 0.02
"""The most that servers may be above the mean, as a part of it, in what plans are compared with."""


def kilobytes(q_rows: float, kv_rows: float) -> float:
    """A moved q row counts with its o row (16 KB), a k,v row with 4 KB."""
    return 16 * q_rows + 4 * kv_rows


def plain_greedy(layout: Layout) -> Plan:
    """The yardstick: the most overloaded server gives its excess of FLOPs to the emptiest one.

    It gives the head or tail of the piece with fewest bytes per FLOP, until no server is above the mean by more
    than ``_UNEVEN``."""
    q = layout.q
    pieces = [
        [[int(x) for x in row] for row in zip(*(c[q.rank == r] for c in (q.document, q.start, q.stop)), strict=True)]
        for r in range(layout.ranks)
    ]
    moved: list[tuple[int, int, int, int]] = []
    load = np.array([sum(_area(a, b) for _, a, b in mine) for mine in pieces])
    limit = (1 + _UNEVEN) * load.mean()
    while load.max() > limit * (1 + 1e-9):
        giver, taker = int(load.argmax()), int(load.argmin())
        amount = min(load[giver] - limit, limit - load[taker])
        best: tuple[float, list[int], int, int] | None = None
        for piece in pieces[giver]:
            _, a, b = piece
            want = min(amount, _area(a, b))
            head = min(b, int(np.ceil(np.sqrt((a + 0.5) ** 2 + 2 * want) - 0.5)))
            tail = max(a, int(np.floor(np.sqrt(max((b + 0.5) ** 2 - 2 * want, 0.25)) - 0.5)))
            for start, stop in ((a, head), (tail, b)):
                price = kilobytes(stop - start, stop) / _area(start, stop)
                if best is None or price < best[0]:
                    best = price, piece, start, stop
        assert best is not None
        _, piece, start, stop = best
        load[giver] -= _area(start, stop)
        load[taker] += _area(start, stop)
        moved.append((piece[0], start, stop, taker))
        pieces[giver].remove(piece)
        pieces[giver] += [[piece[0], a, b] for a, b in ((piece[1], start), (stop, piece[2])) if a < b]
    rows = moved + [(d, a, b, rank) for rank, mine in enumerate(pieces) for d, a, b in mine]
    return Plan(layout, Tasks.sorted(*np.array(rows, np.int64).T))


def _area(start: int, stop: int) -> float:
    return (stop * (stop + 1) - start * (start + 1)) / 2


def figures(layout: Layout, plan: Plan, cost: CostModel = COST) -> dict[str, float]:
    """The figures that one plan achieves, by the costs it was made with."""
    plan.check()
    home, moved = plan_at_home(layout), traffic(plan)
    seconds = {d: server_seconds(plan, cost, d) for d in DIRECTIONS}
    at_home = {d: server_seconds(home, cost, d) for d in seconds}
    return {
        "home_makespan_over_mean": max(imbalance(at_home[d]) for d in seconds),
        "makespan_over_mean": max(imbalance(seconds[d]) for d in seconds),
        "makespan_over_bound": sum(s.max() for s in seconds.values()) / makespan_bound(layout, cost, "both"),
        "work_added": sum(s.sum() for s in seconds.values()) / sum(s.sum() for s in at_home.values()) - 1,
        "q_share": moved.q_rows / layout.tokens,
        "kv_share": moved.kv_rows / layout.tokens,
        "kv_share_at_home": traffic(home).kv_rows / layout.tokens,
        "kb_per_token": kilobytes(moved.q_rows, moved.kv_rows) / layout.tokens,
        "kb_per_token_estimate": estimate(layout, np.sum(list(at_home.values()), axis=0))
        + 4 * traffic(home).kv_rows / layout.tokens,
    }


def estimate(layout: Layout, seconds: np.ndarray) -> float:
    """KB per token if every receiver, emptiest first, were filled by one range at its cheapest place in an endless
    document whose keys it does not have: about what plans of contiguous ranges can reach, besides the k,v rows that
    travel at home already. No bound: a receiver that has some of the keys needs less."""
    limit = (1 + _UNEVEN) * seconds.mean()
    excess = float(np.maximum(seconds - limit, 0).sum())
    rooms = np.sort(np.maximum(limit - seconds, 0))[::-1]
    filled = np.minimum(rooms, np.maximum(excess - (np.cumsum(rooms) - rooms), 0))
    pairs = filled / (COST.forward_terms[0] + COST.backward_terms[0])
    return float(2 * np.sqrt((16 + 4 / 2) * 4 * pairs).sum()) / layout.tokens


def planned(lengths: np.ndarray, servers: int, placement: Placement, cost: CostModel) -> dict[str, float]:
    """The figures that planning achieves, and CPU milliseconds of layout, plan and one rank's routes."""
    took = []
    for _ in range(RUNS):
        times = [time.process_time()]
        (layout,) = lay_out(lengths, servers, placement=placement, cost=cost)
        times.append(time.process_time())
        plan = schedule(layout, cost)
        times.append(time.process_time())
        route(plan, servers // 2)
        times.append(time.process_time())
        took.append(np.diff(times) * 1e3)
    layout_ms, plan_ms, route_ms = np.min(took, axis=0).tolist()
    return {
        **figures(layout, plan, cost),
        "layout_ms": layout_ms,
        "plan_ms": plan_ms,
        "route_ms": route_ms,
        "plan_and_route_ms": plan_ms + route_ms,
        "total_ms": layout_ms + plan_ms + route_ms,
    }


def summarise(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {
        key: {"median": statistics.median(r[key] for r in rows), "max": max(r[key] for r in rows)} for key in rows[0]
    }


def case(lengths: Callable[[int], np.ndarray], servers: int, released: tuple[float, float] | None) -> dict[str, object]:
    """Ten seeds of one mix and size."""
    result: dict[str, object] = {}
    for name, (placement, cost) in KINDS.items():
        rows = [planned(lengths(seed), servers, placement, cost) for seed in range(SEEDS)]
        made: dict[str, object] = {**summarise(rows), "seeds_within_1.02": _within(rows)}
        if released:
            over = [row["kb_per_token"] / kilobytes(*released) for row in rows]
            made["bytes_over_released"] = {"median": statistics.median(over), "seeds": [round(x, 3) for x in over]}
        result[name] = made
    if servers <= 64:
        layouts = [lay_out(lengths(seed), servers)[0] for seed in range(SEEDS)]
        result["plain_greedy"] = summarise([figures(layout, plain_greedy(layout)) for layout in layouts])
    return result


def _within(rows: list[dict[str, float]]) -> str:
    return f"{sum(row['makespan_over_mean'] <= 1.0201 for row in rows)} of {len(rows)} seeds"


def curve(mix: Mix, placement: Placement) -> list[dict[str, float]]:
    """Bytes and makespan by tolerance, medians over the seeds."""
    servers = 64
    layouts = [
        lay_out(sample_lengths(mix, servers * TOKENS, seed), servers, placement=placement, cost=COST)[0]
        for seed in range(SEEDS)
    ]
    points = []
    for tolerance in TOLERANCES:
        rows = [figures(layout, schedule(layout, COST, tolerance=tolerance)) for layout in layouts]
        keys = ("makespan_over_mean", "makespan_over_bound", "kb_per_token", "q_share", "kv_share", "work_added")
        points.append({"tolerance": tolerance, **{key: statistics.median(r[key] for r in rows) for key in keys}})
    return points


def plot(curves: dict[str, list[dict[str, float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for mix, points in curves.items():
        line = axes.plot(
            [p["makespan_over_bound"] for p in points], [p["kb_per_token"] for p in points], "o-", label=mix
        )
        # Others lie so close together that labels would cover each other.
        labelled = [p for p in points if mix.endswith("in order") and p["tolerance"] not in (0.01, 0.03)]
        for p in labelled:
            axes.annotate(
                f"{p['tolerance']:g}",
                (p["makespan_over_bound"], p["kb_per_token"]),
                textcoords="offset points",
                xytext=(2, 5),
                fontsize=7,
                color=line[0].get_color(),
            )
    axes.set(
        xlabel="slowest server / lower bound", ylabel="KB moved per token, forward", xscale="linear", ylim=(0, 4.8)
    )
    axes.legend(title='64 servers; tolerance at the points of "in order"', ncols=2, loc="upper right", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def processor() -> str:
    found = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    return found[0].partition(":")[2].strip() if found else platform.processor()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    results: dict[str, object] = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/planner.py",
        "hardware": f"{processor()}, {os.cpu_count()} cores, one used",
        "versions": {"python": sys.version.split()[0], "numpy": np.__version__, "distca": distca.__version__},
        "tokens_per_server": TOKENS,
        "seeds": SEEDS,
        "released_planner_shares_of_tokens": {"q, kv at 64 servers": RELEASED, "note": "used for 32 servers too"},
    }
    cases: dict[str, object] = {}
    for mix in MIXES:
        for servers in SERVERS:
            tokens = servers * TOKENS
            made = case(
                lambda seed, mix=mix, tokens=tokens: sample_lengths(mix, tokens, seed),  # type: ignore[misc]
                servers,
                RELEASED[mix] if servers in (32, 64) else None,
            )
            cases[f"{mix} {servers}"] = made
            show(f"{mix} {servers}", made)
        for context in (131_072, 262_144, 524_288):
            made = case(
                lambda seed, mix=mix, context=context: sample_long_context(mix, 64 * TOKENS, context, seed),  # type: ignore[misc]
                64,
                None,
            )
            cases[f"{mix} 64, context {context // 1024}K"] = made
            show(f"{mix} 64, context {context // 1024}K", made)
    results["cases"] = cases
    curves = {
        f"{mix}, {name.replace('_', ' ')}": curve(mix, placement)
        for mix in MIXES
        for name, placement in (("in order", KINDS["in_order"][0]), ("spread", KINDS["planner"][0]))
    }
    results["tolerance_curve_64_servers"] = curves
    (ROOT / "results").mkdir(exist_ok=True)
    (ROOT / "results" / "planner.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(curves, ROOT.parent / "docs" / "images" / "planner_tolerance.png")


def show(name: str, made: dict) -> None:
    parts = []
    for kind in KINDS:
        ours = made[kind]
        parts.append(
            f"{kind}: home {ours['home_makespan_over_mean']['median']:.2f} -> "
            f"{ours['makespan_over_mean']['median']:.4f} (max {ours['makespan_over_mean']['max']:.4f}), "
            f"q {ours['q_share']['median']:.3f} kv {ours['kv_share']['median']:.3f} "
            f"{ours['kb_per_token']['median']:.2f} KB, layout {ours['layout_ms']['median']:.1f}, "
            f"plan and route {ours['plan_and_route_ms']['median']:.1f} ms"
            + (f", {ours['bytes_over_released']['median']:.2f}x released" if "bytes_over_released" in ours else "")
        )
    if "plain_greedy" in made:
        greedy = made["plain_greedy"]
        parts.append(
            f"plain greedy {greedy['kb_per_token']['median']:.2f} KB, {greedy['makespan_over_mean']['median']:.3f}"
        )
    print("\n   ".join([name, *parts]), flush=True)


if __name__ == "__main__":
    main()
