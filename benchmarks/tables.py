"""Write the tables and figures of pages that come from kept results: ``python -m benchmarks.tables``.

A part of a page stands between ``<!-- benchmarks.MODULE.FUNCTION -->`` and ``<!-- until here -->``. It is what that
function returns. Here are the functions of the pages about the planner and the simulator.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import chain, combinations, product
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PART = re.compile(r"(<!-- (benchmarks\.\w+)\.(\w+) -->\s*)(.*?)(\s*<!-- until here -->)", re.DOTALL)
MIXES = {"pretrain": "Pretrain", "prolong": "ProLong"}
BASES = ("best-cp", "best-cp-hidden")
"""The best degree of context parallelism, its gathers exposed and hidden."""
PLANS = {
    "slowest_over_mean": ".3f",
    "kb_per_token": ".2f",
    "kb_per_token_between_nodes": ".2f",
    "busiest_over_mean": ".1f",
    "busiest_kb_per_token": ".1f",
    "busiest_kb_per_token_between_nodes": ".1f",
    "kept_kv": ".1f",
    "received_kv": ".1f",
    "exposed": ".1%",
    "all_ms": ".0f",
}
"""Figures of a plan on a network, in the order of the table's columns, and how they are written."""

Figures = dict[str, Any]


def kept(name: str) -> Figures:
    """The content of ``benchmarks/results/NAME.json``."""
    found: Figures = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def rows(*cells: Iterable[str]) -> str:
    """Rows of a table in Markdown."""
    return "\n".join(f"| {' | '.join(each)} |".replace("|  |", "| |") for each in cells)


def percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def written(page: str) -> str:
    """The text of a page with all its parts as their functions have them."""
    return PART.sub(lambda part: f"{part[1]}{getattr(import_module(part[2]), part[3])()}{part[5]}", page)


def plans_on_a_network() -> str:
    """This planner's figures beside those of 2026-11-22, for a node, 64 and 512 servers."""
    head = ["case", "slowest / mean (worst)", "KB per token", "between nodes", "busiest / mean"]
    head += ["busiest, KB per token", "busiest, between nodes", "kept", "over mean, longest"]
    head += ["received", "over mean, longest", "exposed", "CPU ms"]
    lines = [head, ["---"] * len(head)]
    for name, case in kept("planner_network")["cases"].items():
        if not re.search(r" (8|64|512)(,|$)", name):
            continue
        line = [name]
        for figure, form in PLANS.items():
            both = [case[tree][figure] for tree in ("here", "beside")]
            texts = [f"{each['median']:{form}}".replace("%", " %") for each in both]
            if figure == "slowest_over_mean":
                texts = [f"{text} ({each['max']:{form}})" for text, each in zip(texts, both, strict=True)]
            line.append(" \\| ".join(texts))
            if figure.endswith("_kv"):
                over = [case["here"][f"{figure}_over_{what}"]["median"] for what in ("mean", "longest_task")]
                line.append(", ".join(f"{each:.1f}" for each in over))
        lines.append(line)
    return rows(*lines)


def times_of_512_servers() -> str:
    """The shares of the older planner's time that this one takes; of plain Pretrain by itself."""
    over = {
        name: case["here"]["all_ms"]["median"] / case["beside"]["all_ms"]["median"]
        for name, case in kept("planner_network")["cases"].items()
        if re.search(r" 512(,|$)", name)
    }
    plain = over.pop("pretrain 512")
    return f"{min(over.values()):.2f} to {max(over.values()):.2f} of the time of 2026-11-22, but {plain:.2f}"


def times_of_2048_servers() -> str:
    cases = [case["here"]["all_ms"] for name, case in kept("planner_network")["cases"].items() if " 2048" in name]
    seconds = [case["median"] / 1e3 for case in cases]
    most = max(case["max"] for case in cases) / 1e3
    return f"{min(seconds):.2f} to {max(seconds):.2f} s in the median and {most:.2f} s at most"


def calibration() -> str:
    """How far the simulator is off for the runs that it was fitted to, and for the others."""
    found = kept("calibration")
    parts = [(name, found[name.replace(" ", "_")]) for name in ("fitted", "held out")]
    return rows(
        ("", "runs, files", "median error of the step time", "worst"),
        ["---"] * 4,
        *((name, f"{part['runs']}, {part['files']}", *_errors(part)) for name, part in parts),
    )


def calibration_in_short() -> str:
    found = kept("calibration")
    fitted, held_out = (_errors(found[name]) for name in ("fitted", "held_out"))
    orders = f"{found['orders']['right']} of {found['orders']['pairs']} orders of modes right"
    return (
        f"median error {fitted[0]}, worst {fitted[1]}; of files held out of the fit {held_out[0]} and {held_out[1]}; "
        f"{orders}"
    )


def calibration_runs() -> str:
    runs = kept("calibration")["runs"]
    apart = sum(abs(run["error"]) > 0.05 for run in runs)
    return f"{len(runs)} runs of {len({run['file'] for run in runs})} files, {apart} of them more than 5 % off"


def calibration_beside() -> str:
    """How far idle shares and peaks of memory are off."""
    runs = kept("calibration")["runs"]
    pairs = {
        name: [
            (run[f"{name}_predicted"], run[f"{name}_measured"]) for run in runs if run[f"{name}_measured"] is not None
        ]
        for name in ("idle", "memory_gib")
    }
    idle = [100 * abs(predicted - measured) for predicted, measured in pairs["idle"]]
    peaks = [abs(predicted / measured - 1) for predicted, measured in pairs["memory_gib"]]
    return (
        f"{median(idle):.1f} points and {percent(median(peaks))} in the median, {max(idle):.1f} points and "
        f"{percent(max(peaks))} at worst"
    )


def predicted_in_short() -> str:
    found = kept("predicted_kept")
    median_error, worst = (percent(found[f"{which}_error"]) for which in ("median", "worst"))
    return (
        f"median error {median_error}, {found['within_5_percent']} of {found['modes']} modes within 5 %, worst {worst}"
    )


def predicted_apart() -> str:
    """Kept runs that are predicted more than 5 % too fast (+) or too slow, by file and workload."""
    lines = [["run", "predicted over measured tokens/s", "idle share, measured (predicted)"], ["---"] * 3]
    for file, found in kept("predicted_kept")["files"].items():
        for workload, modes in found["cells"].items():
            apart = {mode: each for mode, each in modes.items() if abs(each["error"]) > 0.05}
            if not apart:
                continue
            name, _, run = file.partition(" ")
            idle = [each["idle_share"] for each in apart.values() if each["idle_share"]["measured"] is not None]
            lines.append(
                [
                    f"[{name.removesuffix('.json')}]({name}){run and f' {run}'}, {workload}",
                    ", ".join(f"{mode} {each['error'] * 100:+.1f} %" for mode, each in apart.items()),
                    ", ".join(f"{each['measured'] * 100:.0f} ({each['predicted'] * 100:.0f}) %" for each in idle)
                    or "–",
                ]
            )
    return rows(*lines)


def calibration_orders() -> str:
    orders = kept("calibration")["orders"]
    return f"{orders['right']} of {orders['pairs']} pairs"


def calibration_fp8() -> str:
    runs = [run for run in kept("calibration")["runs"] if re.search("current|delayed|blockwise", run["run"])]
    return f"{len(runs)} runs in FP8 are predicted within {percent(max(abs(run['error']) for run in runs))}"


def _errors(part: Figures) -> tuple[str, str]:
    return percent(part["median_error"]), percent(part["worst_error"])


def papers_grid() -> str:
    """The least and the most of DistCA's speed over context parallelism, beside what the paper measured."""
    from benchmarks.paper_grid import PAPER

    kernels = {"flash4": "flash-attn-4, gathers", "flash2": "310 TFLOP/s,", "fp8": "FP8,"}
    cells = kept("paper_grid")["cells"] + [each | {"kernel": "fp8"} for each in kept("paper_grid_fp8")["cells"]]
    hidden = [f"{name} exposed | hidden" for name in kernels.values()]
    lines = [["", "paper, measured", *hidden], ["---"] * (2 + 2 * len(kernels))]
    for case in product(("3D", "4D"), ("8b", "34b"), MIXES):
        low, high = PAPER[case]
        line = [f"{case[0]}, {case[1].upper()}, {case[2]}", f"{low:.2f}–{high:.2f}" if low > 1 else f"up to {high:.2f}"]
        for kernel, base in product(kernels, BASES):
            these = [each for each in cells if (each["kind"], each["model"], each["mix"]) == case]
            over = [_over(each, base) for each in these if each["kernel"] == kernel]
            assert len(over) == 9, "a context and a number of GPUs is missing"
            line.append(f"{min(over):.2f}–{max(over):.2f}")
        lines.append(line)
    return rows(*lines)


def many_servers() -> str:
    """DistCA's speed over context parallelism, and its exposed bytes, by number of servers and context."""
    cells = {(each["servers"], each["mix"], each["context"]): each for each in kept("simulated_pools")["cells"]}
    contexts = {128: "128K", 512: "512K", 1024: "1M", 4096: "4M"}
    titles = [f"{mix} 128K | 512K | 1M | 4M" for mix in MIXES.values()]
    lines = [["servers", *titles], ["---"] * (1 + len(MIXES) * len(contexts))]
    for servers in sorted({servers for servers, _, _ in cells}):
        line = [f"{servers:,}"]
        for case in product(MIXES, contexts):
            cell = cells.get((servers, *case))
            exposed = cell and percent(cell["modes"]["distca"]["exposed_share"])
            line.append(f"{', '.join(f'{_over(cell, base):.2f}' for base in BASES)}; {exposed}" if cell else "–")
        lines.append(line)
    return rows(*lines)


def experts() -> str:
    """DistCA's speed over others with the same experts, by number of GPUs."""
    cells = {(_of_experts(each), each["gpus"]): each["modes"] for each in kept("simulated_experts")["cells"]}
    gpus = sorted({number for _, number in cells})
    lines = [["", *(f"{number} GPUs" for number in gpus)], ["---"] * (1 + len(gpus))]
    for case in dict.fromkeys(case for case, _ in cells):
        lines.append([case, *("; ".join(_over_others(cells[case, number])) for number in gpus)])
    return rows(*lines)


def experts_in_short() -> str:
    """The least and the most of each figure in the table, by model."""
    texts = []
    for model in ("A3B", "235B"):
        of_model = [each["modes"] for each in kept("simulated_experts")["cells"] if model.lower() in each["model"]]
        columns = list(zip(*map(_over_others, of_model), strict=True))
        known = [sorted(text for text in columns[number] if text != "–") for number in (0, 1, 3)]
        texts.append(f"{model} " + "; ".join(f"{column[0]}–{column[-1]}×" for column in known))
    return "; ".join(texts)


def _of_experts(cell: Figures) -> str:
    name = next(each for each in ("A3B", "235B") if each.lower() in cell["model"])
    return f"{name}, {cell['context']}K, {MIXES[cell['mix']]}"


def _over_others(modes: Figures) -> list[str]:
    """Over packed documents, over context parallelism twice and over one that hides all that it sends, the last two
    with hidden rows of experts."""
    pairs = [("packed", "distca"), ("best-cp", "distca"), ("best-cp", "hidden_experts"), (BASES[1], "hidden_experts")]
    speeds = [modes[mode].get(f"{mine}_over_it") for mode, mine in pairs]
    return ["–" if speed is None else f"{speed:.2f}" for speed in speeds]


def _over(cell: Figures, mode: str) -> float:
    """DistCA's speed over a mode's."""
    return float(cell["modes"]["distca"]["tokens_per_s"] / cell["modes"][mode]["tokens_per_s"])


def slow_network() -> str:
    """Measured and predicted tokens per second of packed documents, context parallelism and DistCA."""
    titles = [f"{mix}: packed | context parallelism | DistCA" for mix in MIXES.values()]
    lines = [["Mbit/s", *titles], ["---"] * 7]
    for megabits, mixes in _speeds():
        texts = [f"{measured:,.0f} ({predicted:,.0f})" for measured, predicted in chain(*mixes)]
        lines.append(["any" if megabits == "0" else megabits, *texts])
    return rows(*lines)


def slow_network_errors() -> str:
    errors, right = [], []
    for megabits, mixes in _speeds():
        for speeds in mixes:
            told = megabits == "0"  # the simulator is told what packed documents take without a limit
            errors += [abs(measured / predicted - 1) for measured, predicted in speeds[told:]]
            apart = [(a, b) for a, b in combinations(speeds, 2) if abs(a[0] / b[0] - 1) > 0.03]
            right += [(a[0] > b[0]) == (a[1] > b[1]) for a, b in apart]
    return (
        f"{percent(median(errors))} in the median and {percent(max(errors))} at worst, "
        f"and the faster of two modes in {sum(right)} of {len(right)} pairs"
    )


def _speeds() -> Iterator[tuple[str, list[list[tuple[float, float]]]]]:
    """(Mbit/s, measured and predicted tokens per second by mix and mode); no limit comes first."""
    links = kept("slow_network")["links"]
    for megabits in sorted(links, key=lambda each: -int(each) or -float("inf")):
        modes = [[links[megabits][f"{mix} 8K"][mode] for mode in ("packed", "cp2-keep", "distca")] for mix in MIXES]
        yield megabits, [[(each["tokens_per_s"], each["tokens_per_s_predicted"]) for each in mix] for mix in modes]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *RESULTS.glob("*.md")):
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
